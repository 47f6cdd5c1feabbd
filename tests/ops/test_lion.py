"""Lion: the reference against bitsandbytes, the kernel against it."""

import numpy as np
import pytest
from references import record_lion as recorded
from support.harness import PROFILES, Bench, assert_checked, assert_close

from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, lion
from qlora_wgpu.reference import optimizers as reference
from qlora_wgpu.selfcheck.cases.optimizers import check_lion

LENGTH = recorded.ELEMENTS
BETAS = {"beta1": 0.9, "beta2": 0.99}


def flat(array):
    data = np.asarray(array, np.float32)
    return vector("flat", data.size, "float32", Storage("flat", "test", data.nbytes, data))


def cut(array, cuts):
    return ShardedVector(tuple(flat(part) for part in np.split(np.asarray(array), cuts)))


def one_step(device, p, g, m, tokens, rates, config, profile="cpu", *, cuts=(), split=None):
    bench = Bench(device, "float32", PROFILES[profile])
    vectors = [cut(each, cuts) for each in (p, g, m)]
    stats = flat([9, tokens, 7, 7])
    info = flat([rates[0], np.nan, np.nan, rates[1]])  # nobody looks at AdamW's corrections
    lion(bench.graph, OptimizerState(*vectors[:2], vectors[2:], info, stats, split), config)
    rows = iter(bench.run(*(piece for each in vectors for piece in each.shards), stats))
    return [*(np.concatenate([next(rows)[0] for _ in each.shards]) for each in vectors),
            next(rows)[0]]  # fmt: skip


def assert_updated(got, state, between, before_m, g, tokens, norm, max_norm):
    """Where rounding decides between signs, either is right: that is at next to none."""
    clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    size = 0.9 * np.abs(before_m) + 0.1 * np.abs(g) / tokens * clip
    certain = np.abs(between) > 1e-6 * size
    certain |= size == 0
    assert certain.mean() > 0.999
    assert_close(got[0][certain], state.p[certain], 2e-6, "float32 arithmetic")
    assert_close(got[2], state.m, 2e-6, "float32 arithmetic")


def test_the_reference_is_bitsandbytes():
    p, gradients = recorded.lion_case()
    state = reference.Lion(p.astype(np.float64), np.zeros(LENGTH))
    with np.load(recorded.FILE) as file:
        for t, g in enumerate(gradients, start=1):
            reference.lion(
                state, g.astype(np.float64), 1, lr=recorded.LR, beta1=recorded.BETAS[0],
                beta2=recorded.BETAS[1], weight_decay=recorded.DECAY, max_norm=0,
            )  # fmt: skip
            assert_close(file[f"p.{t}"], state.p, 1e-6, "float32 arithmetic")
            assert_close(file[f"m.{t}"], state.m, 1e-6, "float32 arithmetic")


@pytest.mark.parametrize("profile", PROFILES)
def test_the_kernel_is_bitsandbytes(device, profile):
    p, gradients = recorded.lion_case()
    m, config = np.zeros(LENGTH), OptimizerConfig(*recorded.BETAS, 0.0, recorded.DECAY, 0.0)
    with np.load(recorded.FILE) as file:
        for t, g in enumerate(gradients, start=1):
            p, _, m, _ = one_step(device, p, g, m, 1, (recorded.LR,) * 2, config, profile)
            assert_close(p, file[f"p.{t}"], 1e-6, "float32 arithmetic")
            assert_close(m, file[f"m.{t}"], 1e-6, "float32 arithmetic")


@pytest.mark.quick("values")
@pytest.mark.parametrize("max_norm", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps(device, max_norm, weight_decay):
    rng = np.random.default_rng(12)
    config = OptimizerConfig(adam_beta2=0.99, weight_decay=weight_decay, max_grad_norm=max_norm)
    p, m = rng.standard_normal(LENGTH), np.zeros(LENGTH)
    for _ in range(4):
        g = rng.standard_normal(LENGTH) * 3
        g[:64] = 0
        state = reference.Lion(p.astype(np.float64), m.astype(np.float64))
        norm, between = reference.lion(
            state, g, 17, lr=1e-2, weight_decay=weight_decay, max_norm=max_norm, **BETAS
        )
        got = one_step(device, p, g, m, 17, (1e-2, 1e-2), config)
        assert not got[1].any()
        assert_close(got[3][2], np.array(norm), 1e-6, "a float32 sum of squares")
        assert_updated(got, state, between, m, g, 17, norm, max_norm)
        p, m = got[0], got[2]


@pytest.mark.parametrize("profile", PROFILES)
def test_vectors_in_pieces(device, profile):
    """The same bits wherever they are cut, B's rate among them."""
    rng = np.random.default_rng(13)
    p, g, m = (rng.standard_normal(LENGTH) for _ in range(3))
    config = OptimizerConfig(adam_beta2=0.99, weight_decay=0.1, max_grad_norm=0.5)
    given = (p, g, m, 5, (1e-2, 0.16), config, profile)
    whole = one_step(device, *given, split=640)
    for cuts in ([512, 1024], [64], [128, 192, 1152]):
        parts = one_step(device, *given, cuts=cuts, split=640)
        for got, expected in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.quick("values")
@pytest.mark.parametrize(("split", "cuts"), [(128, ()), (640, (512, 1024)), (1024, (512, 1024))])
def test_two_rates(device, split, cuts):
    """LoRA+: from `split` on, B has a rate of its own."""
    rng = np.random.default_rng(14)
    p, g, m = (rng.standard_normal(LENGTH) for _ in range(3))
    config = OptimizerConfig(adam_beta2=0.99, weight_decay=0.1)
    got = one_step(device, p, g, m, 5, (1e-2, 0.16), config, cuts=cuts, split=split)
    for rate, part in ((1e-2, slice(split)), (0.16, slice(split, None))):
        expected = reference.Lion(p.copy(), m.copy())
        reference.lion(expected, g, 5, lr=rate, weight_decay=0.1, max_norm=1.0, **BETAS)
        assert_close(got[0][part], expected.p[part], 2e-6, "float32 arithmetic")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("wrong", ["no tokens", np.nan, np.inf, -np.inf])
def test_nothing_changes_but_the_gradient(device, wrong, profile):
    rng = np.random.default_rng(13)
    p, g, m = (np.float32(rng.standard_normal(LENGTH)) for _ in range(3))
    if wrong != "no tokens":
        g[5] = wrong
    tokens = 0 if wrong == "no tokens" else 5
    got = one_step(
        device,
        p,
        g,
        m,
        tokens,
        (1e-2, 1e-2),
        OptimizerConfig(adam_beta2=0.99, weight_decay=0.1),
        profile,
    )
    assert np.array_equal(got[0], p) and np.array_equal(got[2], m)
    assert not got[1].any()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("factor", [1.0, np.inf])
def test_a_gradient_in_halves_makes_the_same_update(device, profile, factor):
    assert_checked(device, profile, "bfloat16", check_lion, "bfloat16", 1.0, factor)
