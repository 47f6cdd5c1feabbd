"""Initial values of an adapter that is a part of its base, from files that are not loaded yet."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.init import pair_of
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, Float32Array
from qlora_wgpu.model.checkpoint_reader import CheckpointReader


def start_of_files(
    adapter: AdapterLayout, source: CheckpointReader, seed: int, progress: Callable[[str], None]
) -> tuple[Float32Array, str]:
    """The flat adapter, and a note for the user on how it was computed."""
    assert source.folder is not None
    kind = adapter.config.init_lora_weights
    began, most = time.monotonic(), 0
    flat = np.zeros(adapter.length, np.float32)
    for spec in adapter.targets:
        name = f"{spec.name}.weight"
        _refuse_few_bits(source.folder, source.stored(name), kind)
        progress(name)
        weight = source.read(name, (spec.out_features, spec.in_features))
        rank, scaling = adapter.peft.rank_of(spec.name), adapter.peft.scaling_of(spec.name)
        pair = pair_of(spec.name, weight, kind, rank, scaling, seed)
        for leaf, array in zip((LORA_A, LORA_B), pair, strict=True):
            adapter.place(spec.name, leaf).view(flat)[:] = array
        most = max(most, _workspace(weight.shape, kind, rank))
    took = time.monotonic() - began
    return flat, (
        f"the adapter starts as parts of {len(adapter.targets)} weights ({kind}), found in "
        f"{took:,.1f} s with at most {most / MIB:,.0f} MiB of host memory; the base keeps the rest"
    )


def _refuse_few_bits(folder: ModelFolder, name: str, kind: str) -> None:
    if folder[name].is_quantized:
        raise UnsupportedModelError(
            f"lora.init_lora_weights: {kind} requires floating-point weights, but {name} in "
            f"{folder.path} is quantized: use the unquantized base, which is quantized here, or "
            "set lora.init_lora_weights to default"
        )


def _workspace(shape: tuple[int, ...], kind: str, rank: int) -> int:
    """Bytes of a weight and of its decomposition."""
    rows, columns = shape
    small = min(shape)
    if kind == "pissa":  # a copy, U and Vᵀ, and LAPACK's divide and conquer
        return 4 * (2 * rows * columns + small * (rows + columns) + 4 * small * small)
    return 4 * (rows * columns + 4 * rank * (rows + columns))
