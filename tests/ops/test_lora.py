"""The thin products of adapters and their gradients, in every way that GPUs cut them."""

from dataclasses import replace

import numpy as np
import pytest
from support.harness import DTYPES, Bench, assert_close, rounded, tolerance

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, gpu_profile
from qlora_wgpu.gpu.matrix import PROMISED, Limits
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import padded
from qlora_wgpu.kernels.common import EXPERT_TILE
from qlora_wgpu.kernels.lora import (
    BOTH_GRADS,
    DOWN,
    FACTOR_GRAD,
    UP_GRAD,
    BothGrads,
    Lora,
    LoraA,
    LoraBGradInput,
    LoraWeightGrad,
)
from qlora_wgpu.reference import linear as reference
from qlora_wgpu.tuning.tuner import candidates

KEY, MODULE, SCALE = 123456, 987654, 0.5
ANY = replace(GPU_PROFILE, least_workgroups=0)  # any number of workgroups is enough
PROFILES = {
    "gpu": GPU_PROFILE,
    **{f"{rows} rows": replace(ANY, lora_rows=rows) for rows in (4, 8, 16)},
    **{f"{n} threads": replace(ANY, lora_threads=n) for n in (32, 64, 128)},
    **{f"tried {i}": replace(p, least_workgroups=0) for i, p in enumerate(candidates(GPU_PROFILE))},
    "few registers": gpu_profile(None, few_registers=True),
    "four ranks": replace(ANY, lora_grad_ranks=4),
    "no memory": replace(ANY, lora_grad_group=(8, 1)),
}
SHAPES = [  # rows, columns of x, of each dy, ranks of a layer
    (37, 72, (130,), 8),
    (150, 44, (83,), 3),
    (1, 5, (3,), 1),
    (5, 530, (1100,), 12),
    (130, 20, (36,), 16),
    (141, 36, (28,), 64),
    (37, 72, (136, 24), 8),
    (149, 40, (136, 8, 72), 16),
    (17, 136, (8, 16, 520), 24),
]


def launched(device, profile, dtype, shape, p):
    rows, inner, outer, r = shape
    rng = np.random.default_rng(4)
    layers = len(outer)
    x = rng.standard_normal((rows, inner))
    dys = [rng.standard_normal((rows, columns)) for columns in outer]
    a, b = rng.standard_normal((layers * r, inner)), rng.standard_normal((sum(outer), r))
    before_a, before_b = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    bench = Bench(device, dtype, profile)
    g, batch = bench.graph, bench.batch_of(1, rows, dropout_key=KEY if p else None)
    lora = Lora(
        layers * r, SCALE, p, MODULE, *map(bench.given, (a, b, before_a, before_b))
    )  # fmt: skip
    tx, (first, *others) = bench.operand(x), map(bench.operand, dys)
    u, du = (g.float32(name, rows, layers * r) for name in ("u", "du"))
    DOWN.launch(g, LoraA(tx, lora, u, batch.info))
    UP_GRAD.launch(g, LoraBGradInput(first, lora, du, others=tuple(others)))
    of_b = LoraWeightGrad(first, u, lora.grad_b, others=tuple(others))
    of_a = LoraWeightGrad(tx, du, lora.grad_a, True, lora.mask, batch.info)
    BOTH_GRADS.launch(g, BothGrads(of_b, of_a))
    got = bench.run(u, du, lora.grad_a, lora.grad_b)

    x, dys = rounded(x, dtype), [rounded(dy, dtype) for dy in dys]
    a, b, before_a, before_b = (rounded(v, "float32") for v in (a, b, before_a, before_b))
    if p:
        x = x * reference.dropout_mask(rows, padded(inner), inner, p, KEY, MODULE)
    parts = np.split(b, np.cumsum(outer)[:-1])
    expected_u = SCALE * x @ a.T
    expected_du = SCALE * np.hstack([dy @ part for dy, part in zip(dys, parts, strict=True)])
    us = np.split(expected_u, layers, axis=1)
    expected_b = before_b + np.vstack([dy.T @ own for dy, own in zip(dys, us, strict=True)])
    expected = (expected_u, expected_du, before_a + expected_du.T @ x, expected_b)
    return g.launches, got, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thin_products_and_gradients(device, profile, dtype, shape):
    _, got, expected = launched(device, PROFILES[profile], dtype, shape, 0.0)
    depths = (shape[1], max(shape[2]), *[max(shape[0], shape[1], *shape[2])] * 2)
    for value, exact, depth in zip(got, expected, depths, strict=True):
        assert_close(value, exact, tolerance("float32", depth), "float32 sums, whatever is given")


@pytest.mark.cover(profile=["gpu", "4 rows", "few registers", "no memory"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s[2]) == 1], ids=str)
def test_dropout(device, profile, dtype, shape):
    _, got, expected = launched(device, PROFILES[profile], dtype, shape, 0.3)
    for value, exact in zip(got, expected, strict=True):
        depth = max(shape[0], shape[1], *shape[2])
        assert_close(value, exact, tolerance("float32", depth), "float32 sums")


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[7]], ids=str)
def test_the_same_bits_again(device, shape):
    runs = [launched(device, ANY, "bfloat16", shape, 0.0)[1] for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("rows", "r", "layers", "down", "up_grad"),
    [  # the most rows that leave 128 workgroups, each of 8 ranks, or on the way back of 8 or 16
        (1024, 8, 1, (8, 128), (8, 128)),
        (1024, 8, 2, (16, 128), (16, 128)),
        (1024, 8, 3, (16, 192), (16, 192)),
        (1024, 16, 1, (16, 128), (8, 128)),
        (1024, 64, 1, (16, 512), (16, 256)),
        (4096, 8, 1, (16, 256), (16, 256)),
        (512, 8, 1, (4, 128), (8, 64)),
        (64, 8, 1, (4, 16), (8, 8)),
        (1, 12, 1, (4, 2), (8, 1)),
    ],
)
def test_rows_of_a_workgroup(rows, r, layers, down, up_grad):
    g = Graph("bfloat16", GPU_PROFILE)
    a, b = g.float32("a", layers * r, 2048), g.float32("b", layers * 2048, r)
    lora = Lora(layers * r, SCALE, 0.0, MODULE, a, b, a, b)
    x, dy, *others = (g.operand("x", rows, 2048) for _ in range(1 + layers))
    DOWN.launch(g, LoraA(x, lora, g.float32("u", rows, layers * r), x))
    du = g.float32("du", rows, layers * r)
    UP_GRAD.launch(g, LoraBGradInput(dy, lora, du, others=tuple(others)))
    own = {"lora/down": 4, "lora/up_grad": 8}
    found = [
        (own[launch.label] * launch.constants["GROUPS"], int(np.prod(launch.workgroups)))
        for launch in g.launches
    ]
    assert found == [down, up_grad]


@pytest.mark.parametrize("profile", PROFILES)
def test_workgroups_are_within_what_is_promised(profile):
    profile = PROFILES[profile]
    for r in (1, 8, 16):
        g = Graph("bfloat16", profile)
        a, b = g.float32("a", r, 64), g.float32("b", 64, r)
        lora = Lora(r, SCALE, 0.0, MODULE, a, b, a, b)
        x, u = g.operand("x", 4096, 64), g.float32("u", 4096, r)
        DOWN.launch(g, LoraA(x, lora, u, x))
        UP_GRAD.launch(g, LoraBGradInput(x, lora, u))
        FACTOR_GRAD.launch(g, LoraWeightGrad(x, u, b))
        for launch in g.launches:
            invocations = int(np.prod(launch.shader.workgroup_size))
            # Sixteen parts of sums of each are in workgroup memory.
            assert Limits(invocations, 4 * 16 * invocations).within(PROMISED)


def test_experts_share_no_tile_of_rows():
    most = max(each.lora_rows for each in (CPU_PROFILE, *PROFILES.values()))
    assert EXPERT_TILE % most == 0


@pytest.mark.parametrize(("threads", "rank", "lanes"), [(64, 16, 4), (32, 16, 2), (64, 24, 2)])
def test_lanes_that_share_a_row_of_the_way_back(threads, rank, lanes):
    """Four, if they divide a row of B and each has sixteen invocations."""
    g = Graph("bfloat16", replace(ANY, lora_threads=threads))
    b = g.float32("b", 64, rank)
    lora = Lora(rank, SCALE, 0.0, MODULE, b, b, b, b)
    UP_GRAD.launch(g, LoraBGradInput(g.operand("x", 40, 64), lora, g.float32("u", 40, rank)))
    assert g.launches[0].constants["LANES"] == lanes
