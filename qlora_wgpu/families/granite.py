"""Granite 3 (IBM, 2024): Llama with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions
from qlora_wgpu.families.llama import Llama, LlamaDetails
from qlora_wgpu.ops.activation import ACTIVATIONS


class Granite(Llama):
    """The family."""

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Logits are divided by ``logits_scaling``; the other three multiply."""
        bias = read.flag("attention_bias")
        divisor = read.number("logits_scaling", 1.0)
        if divisor == 0:
            raise UnsupportedModelError("config.json: logits_scaling must not be 0")
        return LlamaDetails(
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=read.flag("mlp_bias"),
            activation=read.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            embedding_scale=read.number("embedding_multiplier", 1.0),
            residual_scale=read.number("residual_multiplier", 1.0),
            attention_scale=read.number("attention_multiplier", 1.0),
            logit_scale=1.0 / divisor,
        )


FAMILY = Granite()
