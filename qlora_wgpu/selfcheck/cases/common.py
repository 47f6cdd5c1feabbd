"""Inputs that checks share."""

from __future__ import annotations

import zlib

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.selfcheck.runner import Array

ROWS = 37
ONES = np.ones((1, ROWS), np.int64)
KEY = 12345  # of dropout


def normal(name: str, *shape: int) -> Array:
    """Normal numbers that follow from a name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def filled_adapter(
    config: LoraConfig, linears: list[LinearSpec], experts: list[ExpertSpec] | None = None
) -> tuple[Adapter, dict[str, Array]]:
    """An adapter with normal numbers, its gradient zero, and its parts as float32 holds them."""
    adapter = Adapter(config, linears, experts or [])
    parts = adapter.split(adapter.initial(0))
    values = {n: normal(n, *a.shape).astype(np.float32) for n, a in parts.items()}
    flat = adapter.join(values)
    for vector, data in ((adapter.parameters, flat), (adapter.gradient, np.zeros_like(flat))):
        assert vector.storage is not None
        vector.storage.data = data
    return adapter, {name: array.astype(np.float64) for name, array in values.items()}
