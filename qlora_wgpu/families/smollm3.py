"""SmolLM 3 (Hugging Face, 2025): Llama, some of whose layers know no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions
from qlora_wgpu.families.llama import Llama, LlamaDetails
from qlora_wgpu.families.qwen2 import qwen_windows
from qlora_wgpu.ops.activation import ACTIVATIONS


class SmolLM3(Llama):
    """The family."""

    default_theta = 2_000_000.0

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """``no_rope_layers`` has 1 for the layers that do rotate."""
        bias = read.flag("attention_bias")
        rotates = config.get("no_rope_layers")
        if rotates is None:
            every = read.integer("no_rope_layer_interval", 4)
            rotates = [int((i + 1) % every != 0) for i in range(dimensions.num_layers)]
        if not isinstance(rotates, list) or len(rotates) != dimensions.num_layers:
            raise UnsupportedModelError(
                f"config.json: no_rope_layers must have a 0 or 1 for each of the "
                f"{dimensions.num_layers} layers, got {rotates!r}"
            )
        return LlamaDetails(
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=read.flag("mlp_bias"),
            windows=qwen_windows(config, read, dimensions.num_layers),
            rotated=tuple(bool(value) for value in rotates),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            tied=True,
        )


FAMILY = SmolLM3()
