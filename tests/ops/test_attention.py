from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.reference import attention as reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck import runner
from qlora_wgpu.selfcheck.cases.attention import compare_attention

HOISTING = gpu_profile(None, hoists_loads=True)
PADDED = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 3, 0]])


def check(
    device, profile, dtype, heads, kv_heads, head_dim, segments, *, do_dtype="float32", sinks=None,
    **options,
):  # fmt: skip
    bench = Bench(device, dtype, PROFILES[profile] if isinstance(profile, str) else profile)
    given = [] if sinks is None else [rounded(sinks, "float32")]
    sizes, exact = (heads, kv_heads, head_dim), do_dtype == "float32"
    sums = tolerance("float32", segments.shape[1] * head_dim)  # over keys and heads, exp to 1e-6
    with mock.patch.object(runner, "SUMS", sums):
        alone = 1 in (segments.shape[1], options.get("window"))
        near = sums * alone  # where a token sees itself, dq and dk are zero
        compare_attention(bench, sizes, segments, given, exact, near=near, **options)
    assert bench.excess <= 1.0, bench.worst


IN_TEXTURES = replace(cpu_profile(16), in_textures=True)


@pytest.mark.slow
@pytest.mark.cover(head_dim=[96], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 96])
def test_segments_and_sums_of_weights_in_textures(device, dtype, head_dim):
    check(device, IN_TEXTURES, dtype, 4, 2, head_dim, PADDED)
    check(device, IN_TEXTURES, dtype, 4, 2, head_dim, np.ones((1, 19), int), window=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "seq"), [(1, 1), (3, 5)])
def test_sums_of_weights_that_end_within_a_texel(device, dtype, heads, seq):
    check(device, IN_TEXTURES, dtype, heads, 1, 8, np.ones((1, seq), int))


@pytest.mark.slow
@pytest.mark.cover(head_dim=[128], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_short_loops(device, dtype, head_dim):
    short = replace(IN_TEXTURES, short_loops=True)
    check(device, short, dtype, 4, 2, head_dim, PADDED)
    check(device, short, dtype, 4, 2, head_dim, np.ones((1, 19), int), window=7)


@pytest.mark.parametrize(("short_loops", "keys"), [(False, 2), (True, 1)])
def test_short_loops_take_half_as_many_keys_a_turn(short_loops, keys):
    graph = Graph("float32", cpu_profile(8, short_loops=short_loops), 1 << 27)
    q, k, v = (graph.operand(name, 24, 64) for name in "qkv")
    attention(graph, q, k, v, make_batch_buffers(1, 24), 64, 0.125)
    assert [launch.constants["KEYS"] for launch in graph.launches] == [keys]


@pytest.mark.cover(head_dim=[20, 10, 6, 24])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 2, 20), (3, 1, 10), (2, 2, 6), (4, 2, 64), (3, 1, 24)]
)
def test_padding_and_segments(device, profile, dtype, heads, kv_heads, head_dim):
    check(device, profile, dtype, heads, kv_heads, head_dim, PADDED)


@pytest.mark.quick(profile=["cpu", "texture"])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("head_dim", [20, 24])
@pytest.mark.parametrize(
    ("seq", "window", "softcap"), [(7, 3, None), (7, None, 1.5), (70, 33, 4.0), (70, 1, None)]
)
def test_windows_and_softcaps(device, profile, dtype, head_dim, seq, window, softcap):
    segments = PADDED if seq == 7 else np.ones((1, seq), int)
    check(device, profile, dtype, 6, 2, head_dim, segments, window=window, softcap=softcap)


SINKS = np.array([-40.0, 1.3, 0.0, 2.5, 60.0, -1.0])  # nothing, some, everything of a head


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("head_dim", [20, 24])
@pytest.mark.parametrize(("seq", "window"), [(7, 3), (130, None)])
def test_sinks(device, profile, dtype, head_dim, seq, window):
    segments = PADDED if seq == 7 else packed(seq, 21, padding=5)[None]
    options = {"window": window, "sinks": SINKS}
    check(device, profile, dtype, 6, 2, head_dim, segments, **options)


@pytest.mark.slow
@pytest.mark.cover(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_of_columns_in_several_spans(device, dtype):
    check(device, "gpu", dtype, 2, 1, 264, packed(70, 66)[None], sinks=SINKS[1:3])


@pytest.mark.cover(seq=[1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq", [1, 33, 70])
def test_lengths(device, dtype, seq):
    check(device, "cpu", dtype, 6, 2, 20, np.ones((1, seq), int))
    check(device, "texture", dtype, 6, 2, 40, np.ones((1, seq), int))


@pytest.mark.quick(profile=["cpu", "texture"])
@pytest.mark.cover(head_dim=[8, 128])
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


def packed(seq, *begins, padding=0):
    """Segments of one row, each one more than where its sample begins."""
    row = np.searchsorted([*begins, seq], np.arange(seq), side="right")
    row = np.array([0, *begins])[row] + 1
    row[seq - padding :] = 0
    return row


SEVERAL_TILES = {
    "samples of whole tiles, a tail": (3, 1, 10, packed(150, 64, 128)[None], {}),
    "samples that end within tiles": (2, 1, 64, packed(200, 31, 128, padding=40)[None], {}),
    "a window wider than a tile": (4, 2, 24, np.ones((1, 140), int), {"window": 70}),
    "a window within a tile": (2, 1, 64, packed(150, 70)[None], {"window": 33, "softcap": 4.0}),
    "padding in front and within, tails": (3, 1, 10, np.ones((2, 130), int), {}),
    "two columns a lane": (2, 1, 128, packed(90, 70)[None], {"window": 100}),
    "columns in several spans": (2, 1, 160, packed(70, 66)[None], {}),
    "columns in more spans": (1, 1, 264, np.ones((1, 5), int), {}),
}
SEVERAL_TILES["padding in front and within, tails"][3][0, :66] = 0
SEVERAL_TILES["padding in front and within, tails"][3][1, 60:64] = 0


@pytest.mark.slow
@pytest.mark.cover(
    case=[
        "a window within a tile",
        "padding in front and within, tails",
        "columns in several spans",
    ]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least_workgroups", [0, 1024])
@pytest.mark.parametrize("case", SEVERAL_TILES)
def test_several_tiles(device, dtype, case, least_workgroups):
    """A workgroup's 64 rows with every others' 64; heads that share keys together, or each."""
    heads, kv_heads, head_dim, segments, options = SEVERAL_TILES[case]
    if heads == kv_heads and least_workgroups:
        return  # nothing is shared
    profile = replace(GPU_PROFILE, least_workgroups=least_workgroups)
    check(device, profile, dtype, heads, kv_heads, head_dim, segments, **options)


@pytest.mark.slow
@pytest.mark.cover(case=["two columns a lane"], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SEVERAL_TILES)
def test_several_tiles_in_few_registers(device, dtype, case):
    """Loops that no compiler writes out, half as many rows, or scores, of an invocation."""
    heads, kv_heads, head_dim, segments, options = SEVERAL_TILES[case]
    profile = gpu_profile(None, few_registers=True)
    check(device, profile, dtype, heads, kv_heads, head_dim, segments, **options)


@pytest.mark.quick(profile=["cpu", "texture"])
@pytest.mark.parametrize(("profile", "head_dim"), [("gpu", 72), ("texture", 24), ("cpu", 22)])
def test_blocks_that_begin_before_a_tile_or_end_after_it(device, profile, head_dim):
    segments = packed(150, 50, 120, padding=9)[None]
    blocks = np.zeros((*segments.shape, 2), int)
    for begin, end in ((0, 50), (52, 57), (60, 118), (120, 140)):
        blocks[0, begin:end] = begin, end
    kernels = gpu_profile(None, few_registers=True) if profile == "gpu" else IN_TEXTURES
    kernels = PROFILES["cpu"] if profile == "cpu" else kernels
    check(device, kernels, "float32", 2, 1, head_dim, segments, window=5, blocks=blocks)


@pytest.mark.slow
@pytest.mark.cover(head_dim=[20], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 20, 24])
def test_loads_held_back(device, dtype, head_dim):
    """Units of two, four and eight elements, one after the other."""
    check(device, HOISTING, dtype, 4, 2, head_dim, PADDED)


@pytest.mark.full
def test_few_registers_change_no_bit_of_attention(device):
    """Of heads whose scores are held by an invocation, and of those that meet in its memory."""
    for head_dim in (64, 128):
        rng, got = np.random.default_rng(8), []
        q, k, v, do = (rng.standard_normal((150, 2 * head_dim)) for _ in range(4))
        for few_registers in (False, True):
            bench = Bench(device, "bfloat16", gpu_profile(None, few_registers=few_registers))
            tensors = [bench.operand(a, grad=True) for a in (q, k, v)]
            batch = bench.batch_of(1, 150, segments=packed(90, 60)[None])
            o = attention(bench.graph, *tensors, batch, head_dim, 0.125)
            got.append(bench.run_bits(o, *bench.gradients(o, bench.given(do), *tensors)))
        assert all(np.array_equal(a, b) for a, b in zip(*got, strict=True)), head_dim


@pytest.mark.parametrize("limits", [Limits(256, 16 << 10), Limits(128, 1 << 15), Limits(256, 8191)])
def test_workgroups_are_within_limits(limits):
    g = Graph("bfloat16", replace(GPU_PROFILE, limits=limits))
    q = g.operand("q", 70, 128)
    attention(g, q, q, q, make_batch_buffers(1, 70), 128, 0.125)
    tiled = limits == Limits(256, 16 << 10)
    path = "attention/forward_tiled.wgsl" if tiled else "attention/forward.wgsl"
    assert [launch.path for launch in g.launches] == [path]


@pytest.mark.parametrize("blocks", [1, 64, 65])
def test_few_heads_of_keys_are_walked_by_each_of_queries(blocks):
    """By a count of workgroups, not by a device: 8 heads of keys, 512 workgroups."""
    g = Graph("bfloat16", GPU_PROFILE)
    q, k = g.operand("q", 64 * blocks, 32 * 64), g.operand("k", 64 * blocks, 8 * 64)
    q.requires_grad = k.requires_grad = True
    o = attention(g, q, k, k, make_batch_buffers(1, 64 * blocks), 64, 0.125)
    g.add_gradient(o, g.operand("do", q.rows, q.columns))
    g.backward()
    (launch,) = [launch for launch in g.launches if launch.label == "attention/dkdv"]
    each = blocks * 8 < 512
    assert launch.workgroups == (blocks, 32 if each else 8, 1)
    summed = sum(launch.path == "attention/sum_heads.wgsl" for launch in g.launches)
    assert summed == (1 if each else 0)


@pytest.mark.quick(profile=["cpu", "texture"])
@pytest.mark.cover("values", head_dim=[24])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("do_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 20, 24, 64])
def test_gradients_of_any_type_arrive(device, profile, dtype, do_dtype, head_dim):
    check(device, profile, dtype, 4, 2, head_dim, PADDED, do_dtype=do_dtype, softcap=2.0)


@pytest.mark.quick(profile=["cpu", "texture"])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("head_dim", [20, 24])
def test_keys_that_are_values_get_both_gradients(device, profile, dtype, head_dim):
    rng = np.random.default_rng(6)
    rows, scale = PADDED.size, 1 / np.sqrt(head_dim)
    q, do = (rng.standard_normal((rows, 4 * head_dim)) for _ in range(2))
    k = rng.standard_normal((rows, 2 * head_dim))
    bench = Bench(device, dtype, PROFILES[profile])
    tq, tk = (bench.operand(a, grad=True) for a in (q, k))
    batch = bench.batch_of(*PADDED.shape, segments=PADDED)
    o = attention(bench.graph, tq, tk, tk, batch, head_dim, scale)
    got_o, got_dq, got_dk = bench.run(o, *bench.gradients(o, bench.given(do), tq, tk))
    q, k = (rounded(a, dtype) for a in (q, k))
    do = rounded(do, "float32")
    dq, dk, dv = grads(
        reference.attention, do, q, k, k, PADDED, head_dim, scale, stored=got_o, of=3
    )
    bound = tolerance(dtype, PADDED.shape[1] * head_dim)
    why = "sums over keys and heads of terms of order 1, each gradient rounded"
    assert_close(got_dq, dq, bound, why, terms=1.0)
    assert_close(got_dk, dk + dv, bound, why, terms=np.abs(dk).max() + np.abs(dv).max())


@pytest.mark.parametrize("profile", PROFILES)
def test_large_scores_do_not_overflow(device, profile):
    rng = np.random.default_rng(5)
    bench = Bench(device, "float32", PROFILES[profile])
    q, k = (100 * rng.standard_normal((9, 8)) for _ in range(2))
    v = rng.standard_normal((9, 8))
    o = attention(bench.graph, *(bench.operand(a) for a in (q, k, v)), bench.batch_of(1, 9), 8, 1.0)
    (got,) = bench.run(o)
    exact = [rounded(a, "float32") for a in (q, k, v)]
    expected = reference.attention(*exact, np.ones((1, 9), int), 8, 1.0)
    # Scores near 1e5 carry float32's 1e-2 into exp.
    assert_close(got, expected, 2e-2, "rounding of scores of 1e5")


@pytest.mark.quick(profile=["cpu", "texture"])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("source", ["q", "k"])
def test_nan_in_scores_stays_nan(device, profile, dtype, softcap, source):
    """No softmax makes an ordinary share of it, forward or backward."""
    rng = np.random.default_rng(8)
    arrays = {name: rng.standard_normal((9, 16)) for name in ("q", "k", "v", "do")}
    arrays[source][4, 3] = np.nan
    bench = Bench(device, dtype, PROFILES[profile])
    q, k, v, do = (bench.operand(arrays[name]) for name in ("q", "k", "v", "do"))
    q.requires_grad = True  # of all the three, so that nothing else leads NaN to a gradient
    batch = bench.batch_of(1, 9)
    o = attention(bench.graph, q, k, v, batch, 16, 0.25, softcap=softcap)
    got_o, got_dq = bench.run(o, *bench.gradients(o, do, q))
    spoilt = np.arange(9) == 4 if source == "q" else np.arange(9) >= 4
    assert np.isnan(got_o[spoilt]).all() and np.isfinite(got_o[~spoilt]).all()
    assert np.isnan(got_dq[spoilt]).any(axis=1).all()


@pytest.mark.parametrize(("profile", "dtype"), [*VARIANTS, (HOISTING, "bfloat16")])
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(6, {}), (20, {"window": 4, "sinks": SINKS[1:5]}), (24, {"softcap": 1.5})],
)
def test_a_token_after_a_prompt(device, profile, dtype, given, head_dim, options):
    """Of 10 tokens, 9 are a prompt; the last attends to what the cache kept of them."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((10, 4 * head_dim))
    k, v = (rng.standard_normal((10, 2 * head_dim)) for _ in range(2))
    cache, scale, got = KVCache(13), 1 / np.sqrt(head_dim), []
    own_profile = PROFILES[profile] if isinstance(profile, str) else profile
    for tokens in (slice(0, 9), slice(9, 10)):
        bench = Bench(device, dtype, own_profile)
        mask = np.ones((1, tokens.stop - tokens.start), np.int64)
        batch = make_batch_buffers(*mask.shape, CacheView(cache))
        batch.storage.data = encode_batch(batch, mask, mask, past=tokens.start)
        tensors = [bench.given(a[tokens], given) for a in (q, k, v)]
        own = {**options, "sinks": bench.given(options["sinks"])} if "sinks" in options else options
        got += bench.run(attention(bench.graph, *tensors, batch, head_dim, scale, **own))
    q, k, v = (rounded(a, given) for a in (q, k, v))
    # The prompt attends to keys as they are, the token to what the cache holds of them.
    for rows, kept in ((slice(0, 9), given), (slice(9, 10), dtype)):
        exact = (q, rounded(k, kept), rounded(v, kept), np.ones((1, 10), int))
        expected = reference.attention(*exact, head_dim, scale, **options)
        bound = tolerance(dtype, 10 * head_dim)
        assert_close(np.concatenate(got)[rows], expected[rows], bound, "sums over keys and heads")
