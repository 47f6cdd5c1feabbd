import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_checked, assert_close

from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw, gradient_norm
from qlora_wgpu.reference import optimizers as reference
from qlora_wgpu.selfcheck.cases.optimizers import check_update_from_halves

LENGTH = 1216


def flat(array):
    data = np.asarray(array, np.float32)
    return vector("flat", data.size, "float32", Storage("flat", "test", data.nbytes, data))


def cut(array, cuts):
    return ShardedVector(tuple(flat(part) for part in np.split(np.asarray(array), cuts)))


def one_step(device, p, g, m, v, t, tokens, lr, config, profile="cpu", cuts=()):
    bench = Bench(device, "float32", PROFILES[profile])
    info = [lr, 1 - config.adam_beta1**t, np.sqrt(1 - config.adam_beta2**t), 0]
    vectors = [cut(each, cuts) for each in (p, g, m, v)]
    stats = flat([9, tokens, 7, 7])
    adamw(bench.graph, OptimizerState(*vectors[:2], vectors[2:], flat(info), stats), config)
    rows = iter(bench.run(*(piece for each in vectors for piece in each.shards), stats))
    return [*(np.concatenate([next(rows)[0] for _ in each.shards]) for each in vectors),
            next(rows)[0]]  # fmt: skip


@pytest.mark.quick("values")
@pytest.mark.parametrize("max_norm", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps(device, max_norm, weight_decay):
    rng = np.random.default_rng(12)
    config = OptimizerConfig(weight_decay=weight_decay, max_grad_norm=max_norm)
    p, m, v = rng.standard_normal(LENGTH), np.zeros(LENGTH), np.zeros(LENGTH)
    state = reference.AdamW(p.copy(), m.copy(), v.copy())
    for t in range(1, 5):
        g = rng.standard_normal(LENGTH) * 3
        norm = reference.adamw(
            state, g, 17, t, lr=1e-2, beta1=0.9, beta2=0.999, epsilon=1e-8,
            weight_decay=weight_decay, max_norm=max_norm,
        )  # fmt: skip
        p, zeroed, m, v, stats = one_step(device, p, g, m, v, t, 17, 1e-2, config)
        assert not zeroed.any()
        assert_close(stats[2], np.array(norm), 1e-6, "a float32 sum of squares")
        assert_close(p, state.p, 2e-6, "float32 arithmetic")
        assert_close(m, state.m, 2e-6, "float32 arithmetic")
        assert_close(v, state.v, 2e-6, "float32 arithmetic")


@pytest.mark.parametrize("profile", PROFILES)
def test_vectors_in_pieces(device, profile):
    """The same bits wherever they are cut, of the norm, too."""
    rng = np.random.default_rng(13)
    p, g, m, v = (rng.standard_normal(LENGTH) for _ in range(4))
    given = (p, g, m, np.abs(v), 3, 5, 1e-2)
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5)
    whole = one_step(device, *given, config, profile)
    for cuts in ([512, 1024], [64], [128, 192, 1152]):
        parts = one_step(device, *given, config, profile, cuts)
        for got, expected in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.quick("values")
@pytest.mark.parametrize(("split", "cuts"), [(128, ()), (640, (512, 1024)), (1024, (512, 1024))])
def test_two_rates(device, split, cuts):
    """LoRA+: from `split` on, B has a rate of its own."""
    rng = np.random.default_rng(14)
    p, g, m, v = (rng.standard_normal(LENGTH) for _ in range(4))
    v = np.abs(v)
    bench = Bench(device, "float32", PROFILES["cpu"])
    info = flat([1e-2, 1 - 0.9**3, np.sqrt(1 - 0.999**3), 0.16])
    stats = flat([9, 5, 0, 0])
    vectors = [cut(each, cuts) for each in (p, g, m, v)]
    state = OptimizerState(*vectors[:2], vectors[2:], info, stats, split=split)
    adamw(bench.graph, state, OptimizerConfig(weight_decay=0.1))
    got = [np.concatenate([row[0] for row in bench.run(*vectors[0].shards)])]
    for rate, part in ((1e-2, slice(split)), (0.16, slice(split, None))):
        expected = reference.AdamW(p.copy(), m.copy(), v.copy())
        reference.adamw(
            expected, g, 5, 3, lr=rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1,
            max_norm=1.0,
        )  # fmt: skip
        assert_close(got[0][part], expected.p[part], 2e-6, "float32 arithmetic")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("length", [8, 1216, 300_008])  # the last is more than are read at once
def test_norm(device, profile, length):
    """Every element counts, once, and always in the same order."""
    g = np.random.default_rng(15).standard_normal(length) * np.linspace(0.1, 3, length)
    bench = Bench(device, "float32", PROFILES[profile])
    gradient, stats = flat(g), flat([9, 5, 7, 7])
    for _ in range(2):
        gradient_norm(bench.graph, gradient, stats, 1.0)
        (row,) = bench.run(stats)
        assert_close(row[0][2], np.linalg.norm(np.float32(g)) / 5, 1e-6, "a float32 sum")
    assert_close(row[0][3], np.array(1 / 5 / row[0][2]), 1e-5, "the norm is clipped to 1")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_norm_has_the_bits_of_one_piece(device, profile):
    """More than are read at once, in pieces that are no multiples of that."""
    g = np.random.default_rng(15).standard_normal(300_032) * np.linspace(0.1, 3, 300_032)
    found = []
    for cuts in ([], [64 * 1001], [64, 64 * 2000, 64 * 2003, 64 * 4000]):
        bench, stats = Bench(device, "float32", PROFILES[profile]), flat([9, 5, 7, 7])
        gradient_norm(bench.graph, cut(g, cuts), stats, 1.0)
        found.append(bench.run_bits(stats)[0][0][2])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("place", [0, 513, 299_999])
def test_one_element_that_is_not_finite(device, profile, place):
    g = np.ones(300_000, np.float32)
    g.view(np.uint32)[place] = 0x7FFFFFFF
    stats = flat([9, 5, 7, 7])
    bench = Bench(device, "float32", PROFILES[profile])
    gradient_norm(bench.graph, flat(g), stats, 1.0)
    (row,) = bench.run(stats)
    assert np.isnan(row[0][2]) and row[0][3] == 0


# Quiet and signalling NaN of either sign (0x7fffffff is what NVIDIA makes), infinities, and what is
# finite but whose square, or the sum of whose squares, is not.
NOT_FINITE = (
    0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000,
    0x7F000000,
)  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("case", ["no tokens", "sum", *NOT_FINITE])
def test_nothing_changes_but_the_gradient(device, case, profile):
    rng = np.random.default_rng(13)
    p, g, m, v = (np.float32(np.abs(rng.standard_normal(LENGTH))) for _ in range(4))
    if case == "sum":
        g[:256] = 1.8e18  # 64 squares of 1.3e37 each
    elif case != "no tokens":
        g.view(np.uint32)[5] = case
    tokens = 0 if case == "no tokens" else 5
    got = one_step(device, p, g, m, v, 3, tokens, 1e-2, OptimizerConfig(), profile)
    for before, after in zip((p, m, v), (got[0], got[2], got[3]), strict=True):
        assert np.array_equal(before, after)
    assert not got[1].any()
    if case != "no tokens":
        assert not np.isfinite(got[4][2]), "the norm tells that something was wrong"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_gradient_in_halves_makes_the_same_update(device, profile):
    assert_checked(device, profile, "bfloat16", check_update_from_halves, False)
