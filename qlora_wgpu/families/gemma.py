"""Gemma (Mesnard et al., 2024): Llama with GeGLU, norms of 1 + weight and scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions
from qlora_wgpu.families.llama import Llama, LlamaDetails


class Gemma(Llama):
    """The family."""

    def dimensions(self, read: ConfigReader) -> Dimensions:
        """Heads are 256 wide where no key says it."""
        return Dimensions.read(read, head_dim=256)

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Early configurations say ``gelu`` and mean its tanh form, as Hugging Face reads them."""
        read.choice("use_bidirectional_attention", (None, False))
        allowed = ("gelu_pytorch_tanh", "gelu")
        read.choice("hidden_act", allowed, "gelu_pytorch_tanh")
        read.choice("hidden_activation", (None, "gelu_pytorch_tanh"))
        bias = read.flag("attention_bias")
        return LlamaDetails(
            qkv_bias=bias,
            o_bias=bias,
            activation="gelu_pytorch_tanh",
            norm_offset=1.0,
            embedding_scale=math.sqrt(dimensions.hidden_size),
            tied=True,
        )


FAMILY = Gemma()
