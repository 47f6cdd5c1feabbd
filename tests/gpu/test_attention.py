import numpy as np
import pytest

from gpu.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.reference import attention as reference

PADDED = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 3, 0]])


def check(device, profile, dtype, heads, kv_heads, head_dim, segments, **options):
    rng = np.random.default_rng(4)
    size, seq = segments.shape
    rows = size * seq
    q, do = (rng.standard_normal((rows, heads * head_dim)) for _ in range(2))
    k, v = (rng.standard_normal((rows, kv_heads * head_dim)) for _ in range(2))
    scale = 1 / np.sqrt(head_dim)
    bench = Bench(device, dtype, PROFILES[profile])
    tensors = [bench.operand(a, grad=True) for a in (q, k, v)]
    batch = bench.batch_of(size, seq, segments=segments)
    o = attention(bench.graph, *tensors, batch, head_dim, scale, **options)
    # In a model the gradient arrives in float32.
    gradients = bench.gradients(o, bench.given(do), *tensors)
    got = bench.run(o, *gradients)
    q, k, v, do = (rounded(a, dtype) for a in (q, k, v, do))
    expected = [
        reference.forward(q, k, v, segments, head_dim, scale, **options),
        *reference.backward(do, q, k, v, segments, head_dim, scale, o=got[0], **options),
    ]
    bound = tolerance(dtype, seq * head_dim)
    for name, actual, wanted in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        why = f"{name}: sums over keys and heads of terms of order 1, exp to 1e-6"
        assert_close(actual, wanted, bound, why, terms=1.0 if name in ("dq", "dk") else 0.0)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 2, 20), (3, 1, 10), (2, 2, 6), (4, 2, 64), (3, 1, 24)]
)
def test_padding_and_segments(device, profile, dtype, heads, kv_heads, head_dim):
    check(device, profile, dtype, heads, kv_heads, head_dim, PADDED)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("head_dim", [20, 24])
@pytest.mark.parametrize(
    ("seq", "window", "softcap"), [(7, 3, None), (7, None, 1.5), (70, 33, 4.0), (70, 1, None)]
)
def test_windows_and_softcaps(device, profile, dtype, head_dim, seq, window, softcap):
    segments = PADDED if seq == 7 else np.ones((1, seq), int)
    check(device, profile, dtype, 6, 2, head_dim, segments, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq", [1, 33, 70])
def test_lengths(device, dtype, seq):
    check(device, "cpu", dtype, 6, 2, 20, np.ones((1, seq), int))
    check(device, "texture", dtype, 6, 2, 40, np.ones((1, seq), int))


@pytest.mark.parametrize("head_dim", [8, 128, 256])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_narrow_and_wide_heads(device, profile, dtype, head_dim):
    check(device, profile, dtype, 2, 1, head_dim, np.ones((1, 19), int))


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("head_dim", "window"), [(20, None), (64, None), (24, 9)])
@pytest.mark.parametrize("lengths", [(37, 1, 50, 40), (5, 90, 33), (128,)])
def test_packed_samples(device, profile, dtype, head_dim, window, lengths):
    """Keys of earlier samples are not even looked at; segments say where a sample begins."""
    begins = np.cumsum([0, *lengths[:-1]])
    row = np.repeat(begins + 1, lengths)
    padded = np.concatenate([row[: 128 - 12], np.zeros(12, int)])
    segments = np.stack([np.concatenate([row, np.zeros(128 - len(row), int)])[:128], padded[:128]])
    check(device, profile, dtype, 4, 2, head_dim, segments, window=window)


@pytest.mark.parametrize("profile", PROFILES)
def test_large_scores_do_not_overflow(device, profile):
    rng = np.random.default_rng(5)
    bench = Bench(device, "float32", PROFILES[profile])
    q, k = (100 * rng.standard_normal((9, 8)) for _ in range(2))
    v = rng.standard_normal((9, 8))
    o = attention(bench.graph, *(bench.operand(a) for a in (q, k, v)), bench.batch_of(1, 9), 8, 1.0)
    (got,) = bench.run(o)
    exact = [rounded(a, "float32") for a in (q, k, v)]
    expected = reference.forward(*exact, np.ones((1, 9), int), 8, 1.0)
    # Scores near 1e5 carry float32's 1e-2 into exp.
    assert_close(got, expected, 2e-2, "rounding of scores of 1e5")
