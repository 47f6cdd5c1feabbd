"""How large a tile each product gets, and into how many parts its reduction is cut."""

from dataclasses import replace

import pytest

from qlora_wgpu.gpu.backend import MatrixShape
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, gpu_profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels.gemm import GEMM, Gemm


def product(rows, columns, depth, profile=GPU_PROFILE, *, with_rows=True, bias=False, y="bfloat16"):
    g = Graph("bfloat16", profile)
    w = g.operand("w", *((columns, depth) if with_rows else (depth, columns)))
    result = g.operand("y", rows, columns) if y == "bfloat16" else g.float32("y", rows, columns)
    added = g.float_vector("bias", columns) if bias else None
    GEMM.launch(g, Gemm(g.operand("x", rows, depth), w, result, with_rows, bias=added))
    return g.launches


@pytest.mark.parametrize(
    ("sizes", "tile", "parts"),
    [
        ((4096, 8192, 2048), (128, 128), 1),
        ((1024, 2048, 2048), (128, 128), 2),
        ((1024, 512, 2048), (128, 128), 4),  # 32 workgroups and no more
        ((1024, 512, 1000), (64, 64), 1),  # too short to be cut
        ((256, 512, 2048), (64, 64), 4),
        ((40, 4096, 512), (64, 64), 1),  # half of a larger tile would be idle
        ((1024, 100, 8192), (128, 128), 16),
    ],
)
def test_there_are_enough_workgroups(sizes, tile, parts):
    first, *rest = product(*sizes)
    constants, (_, _, deep) = first.constants, first.workgroups
    assert (8 * constants["WG_M"], 8 * constants["WG_N"]) == tile
    assert deep == parts and len(rest) == (parts > 1)


def test_only_the_last_of_several_launches_adds_what_is_no_product():
    first, last = product(1024, 512, 2048, bias=True)
    assert "bias" not in first.tensors and "bias" in last.tensors
    assert first.tensors["y"].dtype == "float32" and last.tensors["y"].dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["register", "tiled", "matrix"])
@pytest.mark.parametrize("with_rows", [True, False])
def test_what_a_kernel_cannot_cut_stays_whole(kind, with_rows):
    profile = replace(gpu_profile(MatrixShape(16, 16, 16, 32)), gemm_kind=kind)
    launches = product(256, 512, 4096, profile, with_rows=with_rows, y="float32")
    is_cut = any(launch.path == "tensor/sum_parts.wgsl" for launch in launches)
    assert is_cut != (with_rows and kind == "register")
