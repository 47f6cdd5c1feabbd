"""Attention's backward is written in every way, and wrong gradients are found."""

import math
import re
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from bench.parts import BENCHMARKS

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

CARD, LIMITS = MatrixShape(16, 16, 16, 32), Limits(1024, 49_152)
HEADS, KV_HEADS, SEQ, HEAD = 4, 2, 24, 16


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_kernel
    import explore_attention
    import explore_gradients
    import exploring
    import gradient_kernel

    return SimpleNamespace(
        kernel=gradient_kernel,
        gradients=explore_gradients,
        exploring=exploring,
        modules=(attention_kernel, explore_attention, gradient_kernel, explore_gradients),
    )


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("kind", ["dq", "dkdv"])
def test_any_beginning_has_todays_kernel_and_each_choice(
    own: SimpleNamespace, kind: str, head: int
) -> None:
    found = own.gradients.ways(CARD, LIMITS, kind, head)
    assert found[0] == own.kernel.Way(kind)
    assert len(set(found)) == len(found) >= 500
    assert own.kernel.Way(kind, padding=0) in found[:60]
    for name in (field.name for field in fields(own.kernel.Way)):
        assert {getattr(way, name) for way in found[:60]} == {getattr(way, name) for way in found}


@pytest.mark.parametrize("kind", ["dq", "dkdv"])
def test_shaders_are_what_ways_promise(own: SimpleNamespace, kind: str) -> None:
    for way in own.gradients.ways(CARD, LIMITS, kind, 64)[:150]:
        code = own.kernel.kernel(way, CARD, 64)
        units = re.findall(r"var<workgroup> \w+: array<vec4<u32>, (\d+)>", code)
        nbytes = 16 * sum(map(int, units))
        assert nbytes == way.nbytes(CARD, 64) <= LIMITS.workgroup_bytes
        assert "limits" in way.problem(CARD, Limits(1024, nbytes - 1), 64)
        assert ("&tile" in code) == way.tiled
        turn = code[code.index("for (var turn") :]
        assert ("left_0_0_0 = " in turn) != way.kept
        assert ("let first_0 = " in turn) == (way.tiled and not way.prefetch)
        products = turn.count("MultiplyAccumulate(left_") * (2 if way.shared else 1)
        assert products == 2 * way.fragments * way.others // 16 * 64 // 16
        assert not re.search(r"var \w+\s*: subgroup_matrix", turn)


def expected(arrays: list[np.ndarray], kind: str) -> np.ndarray:
    """Gradients in float64, of each query head."""
    q, k, v, dout = (array.astype(np.float64) for array in arrays)
    k, v = (np.repeat(array, HEADS // KV_HEADS, 1) for array in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD)
    p = np.exp(np.where(np.tril(np.ones((SEQ, SEQ))) > 0, scores, -np.inf))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("qhd,khd->hqk", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(HEAD)
    if kind == "dq":
        return np.einsum("hqk,khd->qhd", ds, k)[None]
    return np.stack([np.einsum("hqk,qhd->khd", ds, q), np.einsum("hqk,qhd->khd", p, dout)])


@pytest.mark.parametrize("kind", ["dq", "dkdv"])
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("", ""), False),
        (("p * (dp - delta)", "p * (dp - 0.99 * delta)"), True),
        (("last + 1u - o0", "last - o0"), True),  # one row less
        (("ds_[j]", "(ds_[j] + 1e-3)"), True),
        (("head / 2u", "0u"), True),  # another head's keys
    ],
)
def test_broken_kernels_are_found_wrong(
    own: SimpleNamespace, device: Device, monkeypatch: pytest.MonkeyPatch,
    kind: str, change: tuple[str, str], wrong: bool,
) -> None:  # fmt: skip
    for module in own.modules:
        monkeypatch.setattr(module, "HEADS", HEADS)
        monkeypatch.setattr(module, "KV_HEADS", KV_HEADS)
    bench, way = own.exploring.Bench(device), own.kernel.Way(kind, per_head=kind == "dkdv")
    problem = own.gradients.Gradients(bench, CARD, kind, HEAD, SEQ)
    results = expected(problem.arrays, kind)
    read = np.frombuffer(device.read(problem.expected, 4 * results.size), np.float32)
    np.testing.assert_allclose(read.reshape(results.shape), results, atol=1e-5)
    code = own.gradients.plain(kind, HEAD)
    assert change[0] in code
    pipeline = bench.compiled(code.replace(*change))
    sizes = bench.buffer(np.zeros_like(results, np.float32))
    operands = problem.operands | {4: problem.out, 5: sizes}
    assert problem.errors(way)["wrong"] > results.size // 2  # nothing was computed
    device.dispatch(pipeline, bench.bound(pipeline, operands), (SEQ, HEADS, 1))
    assert bool(problem.errors(way)["wrong"]) == wrong
    assert problem.errors(way)["wrong"] == results.size  # NaN, for the next one
    if kind == "dkdv":  # heads that share keys are summed
        problem.bench.device.write(
            problem.out, results.reshape(2, SEQ, KV_HEADS, 2, HEAD).sum(3).astype(np.float32)
        )
        assert problem.errors(own.kernel.Way(kind))["wrong"] == 0
