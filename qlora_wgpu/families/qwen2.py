"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions, layer_windows
from qlora_wgpu.families.llama import Llama, LlamaDetails
from qlora_wgpu.ops.activation import ACTIVATIONS


class Qwen2(Llama):
    """The family."""

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Layers from ``max_window_layers`` on slide, if windows are used at all."""
        return LlamaDetails(
            qkv_bias=True,
            windows=qwen_windows(config, read, dimensions.num_layers),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        )


def qwen_windows(
    config: Mapping[str, Any], read: ConfigReader, layers: int
) -> tuple[int | None, ...]:
    """The windows of Qwen's layers."""
    config = {"sliding_window": 4096, "max_window_layers": 28, **config}  # Hugging Face's defaults
    if not read.flag("use_sliding_window") or config["sliding_window"] is None:
        return (None,) * layers  # layer_types may still be there, and all its layers see everything
    first = ConfigReader(config).number("max_window_layers", 28)
    return layer_windows(config, ConfigReader(config), layers, [i >= first for i in range(layers)])


FAMILY = Qwen2()
