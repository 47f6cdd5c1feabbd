"""Attention's forward is written in every way, and wrong results are found."""

import math
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench.parts import BENCHMARKS

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

CARD, LIMITS = MatrixShape(16, 16, 16, 32), Limits(1024, 49_152)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_kernel
    import explore_attention
    import exploring

    return SimpleNamespace(
        kernel=attention_kernel, attention=explore_attention, exploring=exploring
    )


@pytest.mark.parametrize("head", [64, 128])
def test_any_beginning_has_todays_kernel_and_each_choice(own: SimpleNamespace, head: int) -> None:
    found = own.attention.ways(CARD, LIMITS, head)
    assert found[0] == own.kernel.Way() and len(set(found)) == len(found) >= 1000
    assert own.attention.ONLINE[0] in found[:3]
    for name in (field.name for field in fields(own.kernel.Way)):
        assert {getattr(way, name) for way in found[:90]} == {getattr(way, name) for way in found}


def test_shaders_are_what_ways_promise(own: SimpleNamespace) -> None:
    for way in own.attention.ways(CARD, LIMITS, 64)[:200]:
        code = own.kernel.kernel(way, CARD, 64)
        units = re.findall(r"var<workgroup> \w+: array<vec4<u32>, (\d+)>", code)
        online = way.growth >= 0
        nbytes = 16 * sum(map(int, units)) + online * (4 * way.rows(CARD) + 8)
        assert nbytes <= way.nbytes(CARD, 64) <= LIMITS.workgroup_bytes
        assert "limits" in way.problem(CARD, Limits(1024, nbytes - 1), 64)
        assert ("q_tile[" in code) == (not way.q_kept)
        assert ("tile[" in code) == (way.tiles > 0)
        assert code.count("let is_whole") == (1 if online else 2)  # rounds
        assert (f"> reference_0 + {way.growth}.0" in code) == online == ("grew" in code)
        largest = 2.0 ** (15 if online else 14)  # of a weight, in f16
        assert f"vec4<f32>({int(math.log2(largest)) - max(way.growth, 0)}.0 - reference_0)" in code
        # Tint gives a matrix no new zeros that a loop declares without them.
        loop = code[code.index("for (var k0") :]
        assert not re.search(r"var \w+\s*: subgroup_matrix", loop)


@pytest.fixture
def few_heads(own: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    for module in (own.kernel, own.attention):
        monkeypatch.setattr(module, "HEADS", 4)
        monkeypatch.setattr(module, "KV_HEADS", 2)
    return own


SEQ, HEAD = 24, 16


def expected(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Results and log-sum-exps in float64."""
    q, k, v = (array.astype(np.float64) for array in arrays)
    k, v = (np.repeat(array, 2, 1) for array in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD)
    scores = np.where(np.tril(np.ones((SEQ, SEQ))) > 0, scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("hqk,khd->qhd", np.exp(scores - lse[..., None]), v), lse.T


def read(device: Device, buffer: object, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(device.read(buffer, 4 * like.size), np.float32).reshape(like.shape)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("", ""), False),
        (("key <= query) {", "key < query || query == 0u) {"), True),  # one key less
        (("total / sum", "total / sum * 1.002"), True),
        (("highest + log(sum)", "highest + log(sum) + 0.001"), True),
        (("head / 2u", "0u"), True),  # another head's keys
    ],
)
def test_broken_kernels_are_found_wrong(
    few_heads: SimpleNamespace, device: Device, change: tuple[str, str], wrong: bool
) -> None:
    attention = few_heads.attention
    bench = few_heads.exploring.Bench(device)
    problem = attention.Attention(bench, CARD, HEAD, SEQ)
    results, lse = expected(problem.arrays)
    np.testing.assert_allclose(read(device, problem.expected, results), results, atol=2e-6)
    np.testing.assert_allclose(read(device, problem.expected_lse, lse), lse, atol=2e-6)
    code = attention.plain(HEAD)
    assert change[0] in code
    pipeline = bench.compiled(code.replace(*change, 1))
    operands = problem._operands(problem.k) | {6: bench.buffer(np.zeros_like(results, np.float32))}
    assert problem.errors()["wrong"] > SEQ  # nothing was computed
    device.dispatch(pipeline, bench.bound(pipeline, operands), (SEQ, 4, 1))
    assert bool(problem.errors()["wrong"]) == wrong
    assert problem.errors()["wrong"] == results.size + lse.size  # NaN, for the next one


def test_ways_take_what_divides_their_rows(own: SimpleNamespace) -> None:
    way = own.kernel.Way()  # of 64 queries
    assert way.fits(CARD, 1024) and not way.fits(CARD, 96)
    assert not way.problem(CARD, LIMITS, 64) and not way.problem(CARD, LIMITS, 128)
    assert "registers" in replace(way, fragments=4, tiles=0, prefetch=False).problem(
        CARD, Limits(1024, 1 << 20), 128
    )
