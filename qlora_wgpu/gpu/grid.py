"""Grids of workgroups, folded where they exceed what WebGPU dispatches along a dimension.

Kernels are launched on grids of any size. One that fits is dispatched as it is. Any other is
dispatched as a rectangle of as many workgroups, and the preprocessor begins the shader's ``main``
with finding the place in the grid again, from constants that say what the grid was.
"""

from __future__ import annotations

import math

from qlora_wgpu.gpu.preprocessor import FOLD, GRID, Constant

MAX_WORKGROUPS = 65_535  # along each dimension, by WebGPU's default limits

Workgroups = tuple[int, int, int]


def is_within_limits(workgroups: Workgroups) -> bool:
    """Whether a grid can be dispatched as it is."""
    return max(workgroups) <= MAX_WORKGROUPS


def fold_workgroups(count: int) -> Workgroups:
    """Spreads a one-dimensional count of workgroups over x and y.

    Shaders of such grids (``common/flat.wgsl``) recover the index as ``workgroup_id.y *
    num_workgroups.x + workgroup_id.x`` and return where it lies past their end.
    """
    if count <= MAX_WORKGROUPS:
        return (max(count, 1), 1, 1)
    rows = -(-count // MAX_WORKGROUPS)
    return (-(-count // rows), rows, 1)


def fold_grid(workgroups: Workgroups) -> tuple[Workgroups, dict[str, Constant]]:
    """What is dispatched for a grid, and the constants by which a shader finds its place in it."""
    if is_within_limits(workgroups):
        return workgroups, {}
    folded = fold_workgroups(math.prod(workgroups))
    sizes = dict(zip(GRID, workgroups, strict=True))
    return folded, {**sizes, FOLD: folded[0]}
