"""Qwen 3 as a mixture of experts (Yang et al., 2025): Qwen3-30B-A3B, Qwen3-Coder and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions
from qlora_wgpu.families.llama import LlamaDetails
from qlora_wgpu.families.moe import Experts, read_counts
from qlora_wgpu.families.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """The family."""

    def dimensions(self, read: ConfigReader) -> Dimensions:
        """The usual division where no key says how wide heads are."""
        return Dimensions.read(read)

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Qwen 3's, and which layers have experts; where one slides, all do."""
        count, top = read_counts(config, read, 128, 8)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
            raise UnsupportedModelError("config.json: mlp_only_layers must be a list of integers")
        step = read.integer("decoder_sparse_step", 1)
        experts = Experts(
            layers=tuple(
                i not in dense and (i + 1) % step == 0 for i in range(dimensions.num_layers)
            ),
            count=count,
            top=top,
            intermediate_size=read.integer("moe_intermediate_size", 768),
            normalized=read.flag("norm_topk_prob"),
        )
        slides = read.flag("use_sliding_window")
        window = read.integer("sliding_window", 4096) if slides else None
        windows = (window,) * dimensions.num_layers
        return replace(super().details(config, read, dimensions), windows=windows, experts=experts)


FAMILY = Qwen3Moe()
