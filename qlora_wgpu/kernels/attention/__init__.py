"""Attention's kernels: a workgroup processes a block of queries, or of keys, of one head."""

from __future__ import annotations

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.kernels.attention.matrix_units import SIZED_ROWS, MatrixTiles, delta_and_sizes
from qlora_wgpu.kernels.attention.problem import Attention, Gradients
from qlora_wgpu.kernels.attention.workgroup import Registers, SubgroupTexture, WorkgroupTiles
from qlora_wgpu.kernels.common import Change, Kernel, Tunable, Variant

__all__ = [
    "ATTENTION",
    "KERNELS",
    "SIZED_ROWS",
    "TUNABLES",
    "Attention",
    "Gradients",
    "MatrixTiles",
    "delta_and_sizes",
]


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.is_software:
        return ()
    registers: tuple[Change, ...] = tuple(
        {"attention_kind": "register", "attention_threads": threads, "attention_keys": keys}
        for threads, keys in ((32, 4), (64, 4), (32, 8), (64, 2))
    )
    if profile.attention_kind != "matrix":
        other = not profile.attention_few_registers
        return ({"attention_kind": "tiled", "attention_few_registers": other}, *registers)
    strips = (2, 8, 1)
    return (
        {"attention_kind": "tiled"},
        *({"attention_kind": "matrix", "attention_strips": count} for count in strips),
        registers[0],
    )


_BLOCKS = (SubgroupTexture(), MatrixTiles(), WorkgroupTiles(), Registers())
ATTENTION = Kernel("attention", tuple(Variant(each.fits, each.launch) for each in _BLOCKS))
KERNELS = (ATTENTION,)
TUNABLES = (Tunable("attention", lambda launch: launch.kernel == "attention", _changes),)
