"""Mistral (Jiang et al., 2023): Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.models.blocks import Sizes, layer_windows
from qlora_wgpu.models.family import ConfigReader
from qlora_wgpu.models.llama import Llama, LlamaDetails
from qlora_wgpu.ops.activation import ACTIVATIONS


class Mistral(Llama):
    """The family."""

    def details(self, config: Mapping[str, Any], read: ConfigReader, sizes: Sizes) -> LlamaDetails:
        """Every layer slides, if there is a window."""
        config = {"sliding_window": 4096, **config}  # Hugging Face's default
        slides = [config["sliding_window"] is not None] * sizes.num_layers
        return LlamaDetails(
            windows=layer_windows(config, ConfigReader(config), sizes.num_layers, slides),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        )


FAMILY = Mistral()
