"""Mixtral (Jiang et al., 2024): Mistral as a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.layers import Dimensions
from qlora_wgpu.families.llama import LlamaDetails
from qlora_wgpu.families.mistral import Mistral
from qlora_wgpu.families.moe import Experts, read_counts


class Mixtral(Mistral):
    """The family."""

    default_theta = 1_000_000.0

    def details(
        self, config: Mapping[str, Any], read: ConfigReader, dimensions: Dimensions
    ) -> LlamaDetails:
        """Mistral's, and experts in every layer."""
        read.choice("router_jitter_noise", (0, 0.0, None))
        count, top = read_counts(config, read, 8, 2)
        experts = Experts(
            layers=(True,) * dimensions.num_layers,
            count=count,
            top=top,
            intermediate_size=dimensions.intermediate_size,
            normalized=True,
            at="block_sparse_moe",
            leaves=("w1", "w3", "w2"),
        )
        config = {"sliding_window": None, **config}
        return replace(super().details(config, read, dimensions), experts=experts)


FAMILY = Mixtral()
