"""Qwen 3 (Yang et al., 2025): Llama with normalized queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions
from qlora_wgpu.families.llama import Llama, LlamaDetails
from qlora_wgpu.families.qwen2 import qwen_windows
from qlora_wgpu.ops.activation import ACTIVATIONS


class Qwen3(Llama):
    """The family."""

    def dimensions(self, read: ConfigReader) -> Dimensions:
        """Heads are 128 wide where no key says it."""
        return Dimensions.read(read, head_dim=128)

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Every head of q and k is normalized."""
        bias = read.flag("attention_bias")
        return LlamaDetails(
            qkv_bias=bias,
            o_bias=bias,
            head_norm=True,
            windows=qwen_windows(config, read, dimensions.num_layers),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        )


FAMILY = Qwen3()
