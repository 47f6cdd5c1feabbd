"""Gemma 3, text (Kamath et al., 2025): Gemma 2 with normalized q and k and two rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.families.family import ConfigReader
from qlora_wgpu.families.gemma2 import Gemma2
from qlora_wgpu.families.rope import Rope, read_rope


class Gemma3(Gemma2):
    """The family."""

    head_norm = True
    default_softcaps: Mapping[str, float] = {}

    def sliding(self, config: Mapping[str, Any], layers: int) -> list[bool]:
        """Five layers of six slide, or what ``sliding_window_pattern`` says."""
        read = ConfigReader(config)
        old = "sliding_window_pattern"
        every = read.integer(old if old in config else f"_{old}", 6)
        return [(i + 1) % every != 0 for i in range(layers)]

    def ropes(
        self, config: Mapping[str, Any], head_dim: int, windows: tuple[int | None, ...]
    ) -> tuple[Rope, ...]:
        """Sliding layers rotate by a base of their own and are not rescaled."""
        if isinstance(config.get("rope_parameters"), Mapping):
            far = read_rope(config, head_dim, layer_type="full_attention")
            near = read_rope(config, head_dim, layer_type="sliding_attention")
        else:
            far = read_rope(config, head_dim, default_theta=1e6)
            base = ConfigReader(config).number("rope_local_base_freq", 10000.0)
            near = read_rope({"rope_theta": base}, head_dim)
        return tuple(far if window is None else near for window in windows)


FAMILY = Gemma3()
