from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
from support.harness import (
    PROFILES,
    VARIANTS,
    Bench,
    assert_checked,
    assert_close,
    assert_formula,
    rounded,
)

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels import gated_delta as kernels
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.delta_net import gated_delta_rule
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.reference import delta_net as reference
from qlora_wgpu.selfcheck.cases.common import Exact, arguments_of
from qlora_wgpu.selfcheck.cases.texts import (
    check_causal_conv_step,
    check_gated_delta_step,
    check_short_conv_step,
)

# float32 sums over states that hold a whole sample; and one rounding of o and the gradients.
BOUNDS = {"float32": 2e-5, "bfloat16": 2**-8 + 2e-5}
NAMES = ("o", "dq", "dk", "dv", "ddecay", "dbeta")


def compare(device, profile, dtype, heads, segments, chunk, seed=3, decay=None, beta=None):
    """o and all gradients of random inputs against the reference."""
    rng, segments = np.random.default_rng(seed), np.asarray(segments)
    rows, keys = segments.size, heads.keys * heads.key_dim
    q, k = (rng.standard_normal((rows, keys)) * 3 for _ in range(2))
    v = rng.standard_normal((rows, heads.values * heads.value_dim))
    gates = rng.standard_normal((2, rows, heads.values))
    decay = -np.exp(gates[0]) / 4 if decay is None else decay(rng, (rows, heads.values))
    beta = 1 / (1 + np.exp(-gates[1])) if beta is None else beta(rng, (rows, heads.values))
    bench = Bench(device, dtype, PROFILES[profile])
    batch = bench.batch_of(*segments.shape, segments=segments)

    def op(g, *given):
        return gated_delta_rule(g, *given, batch, *astuple(heads), chunk=chunk)

    def formula(*given):
        return reference.gated_delta_rule(*given, segments, heads)

    inputs = [q, k, v, Exact(decay), Exact(beta)]
    assert_formula(bench, op, formula, inputs, exact=False, sums=BOUNDS["float32"])


# Samples packed at odd places, padding between them, behind and before them.
PACKED = np.array(
    [
        [0] * 3 + [4] * 20 + [24] * 2 + [26] + [27] * 24,
        [1] * 37 + [0] * 2 + [40] * 9 + [0] * 2,
    ]
)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_packed_samples(device, profile, dtype):
    compare(device, profile, dtype, reference.Heads(2, 4, 24, 40), PACKED, 16)


@pytest.mark.cover(beyond=[1, None], chunk=[16, 64])
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("beyond", [-1, 0, 1, None])
def test_every_length(device, chunk, beyond):
    length = 1 if beyond is None else chunk + beyond
    compare(
        device, "gpu", "float32", reference.Heads(1, 3, 8, 16), np.ones((1, length), int), chunk
    )


DECAYS = {
    "none": lambda rng, shape: np.zeros(shape),
    "strong": lambda rng, shape: np.full(shape, -20.0),
    "all lost at times": lambda rng, shape: np.where(rng.random(shape) < 0.1, -900.0, -1e-3),
    "strong and weak": lambda rng, shape: np.where(rng.random(shape) < 0.5, -20.0, -1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
def test_decays(device, decay):
    segments = np.ones((1, 150), int)
    compare(
        device, "gpu", "float32", reference.Heads(1, 3, 8, 16), segments, 64, decay=DECAYS[decay]
    )


BETAS = {
    "nothing is written": lambda rng, shape: np.full(shape, 1e-6),
    "all is overwritten": lambda rng, shape: np.full(shape, 1 - 1e-6),
    "either": lambda rng, shape: np.where(rng.random(shape) < 0.5, 0.0, 1.0),
}


@pytest.mark.parametrize("beta", BETAS)
def test_betas(device, beta):
    segments = np.ones((1, 150), int)
    compare(device, "gpu", "float32", reference.Heads(1, 3, 8, 16), segments, 64, beta=BETAS[beta])


@pytest.mark.full
def test_heads_of_odd_sizes(device):
    """A state in several parts, of which the last is not whole; more key rows than columns."""
    compare(device, "gpu", "float32", reference.Heads(2, 2, 40, 24), np.ones((2, 33), int), 32)
    compare(device, "gpu", "bfloat16", reference.Heads(1, 1, 136, 8), np.ones((1, 20), int), 16)


def test_heads_in_blocks(device, monkeypatch):
    """Heads whose intermediates are too much for one binding are launched one after the other."""
    monkeypatch.setattr(kernels, "_BLOCK_BYTES", 1)
    compare(device, "gpu", "float32", reference.Heads(2, 4, 8, 16), PACKED, 16)


def test_a_sample_is_the_same_wherever_it_lies(device):
    """To the bit: neither what is packed before it nor what follows is read."""
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((16, n)) for n in (8, 8, 16, 2, 2)]
    arrays[3], arrays[4] = -np.abs(arrays[3]), np.abs(np.tanh(arrays[4]))
    arrays.append(rng.standard_normal((16, 16)))

    def results(before, after):
        """Of the sample alone; what surrounds it is so large that it would show."""
        surrounded = [np.pad(a, ((before, after), (0, 0)), constant_values=3e4) for a in arrays]
        for gates, value in zip(surrounded[3:5], (-0.1, 0.5), strict=True):
            gates[:before] = gates[before + 16 :] = value
        bench = Bench(device, "float32", PROFILES["gpu"])
        segments = np.array([[1] * before + [before + 1] * 16 + [before + 17] * after])
        batch = bench.batch_of(*segments.shape, segments=segments)
        *given, do = [bench.given(a, grad=True) for a in surrounded]
        o = gated_delta_rule(bench.graph, *given, batch, 1, 2, 8, 8, chunk=16)
        got = bench.run(o, *bench.gradients(o, do, *given))
        return [a[before : before + 16] for a in got]

    alone = results(0, 0)
    for a, b in zip(alone, results(16, 5), strict=True):
        assert np.array_equal(a, b)
    for name, a, b in zip(NAMES, alone, results(5, 11), strict=True):
        assert_close(b, a, BOUNDS["float32"], f"{name}: other chunks")


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_new_tokens_after_a_prompt(device, profile, dtype):
    """A prompt with padding behind it, two tokens by themselves, and the state that they leave."""
    heads, prompt, total, cache = reference.Heads(2, 4, 24, 40), 19, 21, KVCache(24)
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, total, 48))
    v, beta = rng.standard_normal((total, 160)), rng.random((total, 4))
    decay = -rng.random((total, 4))
    bench, outputs = Bench(device, dtype, PROFILES[profile]), []
    for first, last, padding in ((0, prompt, 4), (prompt, prompt + 1, 0), (prompt + 1, total, 0)):
        rows = [np.pad(a[first:last], ((0, padding), (0, 0))) for a in (q, k, v, decay, beta)]
        given = [bench.operand(a) for a in rows[:3]] + [bench.given(a) for a in rows[3:]]
        mask = np.pad(np.ones((1, last - first), np.int64), ((0, 0), (0, padding)))
        batch = make_batch_buffers(*mask.shape, CacheView(cache))
        batch.storage.data = encode_batch(batch, np.zeros_like(mask), mask, past=first)
        outputs.append(gated_delta_rule(bench.graph, *given, batch, 2, 4, 24, 40, chunk=16))
    *got, state = bench.run(*outputs, cache.states[0])
    q, k, v = (rounded(a, dtype) for a in (q, k, v))
    inputs = rounded(decay, "float32"), rounded(beta, "float32"), np.ones((1, total), int), heads
    o = np.concatenate([got[0][:prompt], *got[1:]])
    assert_close(
        o, reference.gated_delta_rule(q, k, v, *inputs), BOUNDS[dtype], "sums over a sample"
    )
    left = reference.last_state(k, v, *inputs).reshape(-1, 40)
    assert_close(state, left, BOUNDS["float32"], "sums over a sample")


@pytest.mark.parametrize(("check", "sizes"), [
    (check, sizes)
    for check in (check_gated_delta_step, check_causal_conv_step, check_short_conv_step)
    for sizes in arguments_of(check)
])  # fmt: skip
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_new_tokens_go_on_from_what_is_kept_of_the_prompt(device, profile, dtype, check, sizes):
    assert_checked(device, profile, dtype, check, *sizes)


@pytest.mark.parametrize(("most", "blocks"), [(None, 1), (2**22, 2), (2**10, 4)])
def test_heads_are_launched_together_as_far_as_they_are_bound(most, blocks):
    """Eight value heads of four keys, whose largest intermediate is of 2 MiB a pair of heads."""
    g = Graph("bfloat16", PROFILES["gpu"], most or 1 << 30)
    rows = 2048
    q, k = g.operand("q", rows, 4 * 64), g.operand("k", rows, 4 * 64)
    v, gates = g.operand("v", rows, 8 * 64), [g.float32(n, rows, 8) for n in ("decay", "beta")]
    gated_delta_rule(g, q, k, v, *gates, make_batch_buffers(1, rows), 4, 8, 64, 64)
    launched = [launch.path for launch in g.launches]
    counts = {path: launched.count(path) for path in launched if launched.count(path) > 1}
    assert max(counts.values(), default=1) == blocks, counts


def test_operations_are_counted_of_states_and_of_half_a_chunk_s_pairs():
    sizes = SimpleNamespace(chunk=16, key_dim=8, value_dim=24, rows=100)
    block = SimpleNamespace(problem=sizes, heads=3)
    assert kernels._Block.flops(block, 1, 0, 0) == 2 * 300 * 8 * 24
    assert kernels._Block.flops(block, 0, 2, 0) == 2 * 300 * 16 * 8
    assert kernels._Block.flops(block, 2, 2, 1) == 2 * 300 * (2 * 8 * 24 + 16 * (16 + 24) // 2)
