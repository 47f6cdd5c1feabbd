"""Mistral (Jiang et al., 2023): Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions, layer_windows
from qlora_wgpu.families.llama import Llama, LlamaDetails
from qlora_wgpu.ops.activation import ACTIVATIONS


class Mistral(Llama):
    """The family."""

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Every layer slides, if there is a window."""
        config = {"sliding_window": 4096, **config}  # Hugging Face's default
        slides = [config["sliding_window"] is not None] * dimensions.num_layers
        return LlamaDetails(
            windows=layer_windows(config, ConfigReader(config), dimensions.num_layers, slides),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        )


FAMILY = Mistral()
