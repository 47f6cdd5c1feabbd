"""Attention on matrix units: the GPU's, where it has some, and those that are plain WGSL."""

from dataclasses import replace

import numpy as np
import pytest
from support.harness import Bench, assert_close, rounded, tolerance
from support.matrix_units import FLOATS, HALVES, emulated

from ops.test_attention import packed
from qlora_wgpu.gpu import probe
from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.kernels.attention.matrix_units import matrix_tiling
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.reference import attention as reference
from qlora_wgpu.reference.tape import grads

NVIDIA = MatrixShape(16, 16, 16, 32)
LARGE = Limits(1024, 49_152)


@pytest.fixture(scope="module")
def compiling(device):
    """Compiles matrix units as plain WGSL; pipelines are kept for the whole module."""
    backend, original, pipelines = device.backend, device.backend.compile, device._pipelines
    backend.compile = lambda raw, code, label: original(raw, emulated(code), label)
    device._pipelines = {}
    yield
    backend.compile, device._pipelines = original, pipelines


@pytest.fixture(params=["f16", "f32"])
def halves(request, device, compiling):
    """Profiles of both kinds of factors, and the type of operands."""
    shape = HALVES if request.param == "f16" else FLOATS
    profile = replace(gpu_profile(shape, device.limits), attention_strips=2)
    return replace(profile, least_workgroups=0)


def run(device, profile, arrays, segments, head_dim, *, counts=None, **options):
    """(o, dq, dk, dv), and the arrays as the device had them."""
    dtype = "bfloat16" if profile.matrix_element == "f16" else "float32"
    size, seq = segments.shape
    bench = Bench(device, dtype, profile)
    bench.graph.saturated = counts
    q, k, v = (bench.operand(a, grad=True) for a in arrays[:3])
    batch = bench.batch_of(size, seq, segments=segments)
    own = {**options, "sinks": bench.given(options["sinks"])} if "sinks" in options else {**options}
    if "blocks" in options:
        batch = bench.batch(segments, blocks=own.pop("blocks"))
    o = attention(bench.graph, q, k, v, batch, head_dim, 0.3, **own)
    gradients = bench.gradients(o, bench.given(arrays[3]), q, k, v)
    paths = [x.path for x in bench.graph.launches if x.label.startswith("attention/d")]
    assert sum("_matrix" in path for path in paths) == 2
    got = bench.run(o, *gradients)
    given = [rounded(a, dtype) for a in arrays[:3]] + [rounded(arrays[3], "float32")]
    return got, given


def normal(segments, heads, kv_heads, head_dim):
    random = np.random.default_rng(3)
    widths = (heads, kv_heads, kv_heads, heads)
    return [random.normal(size=(segments.size, n * head_dim)) for n in widths]


def expect(got, given, segments, head_dim, **options):
    q, k, v, do = given
    return (
        reference.attention(q, k, v, segments, head_dim, 0.3, **options),
        *grads(
            reference.attention,
            do,
            q,
            k,
            v,
            segments,
            head_dim,
            0.3,
            stored=got[0],
            **options,
            of=3,
        ),
    )


def check(device, profile, segments, heads=2, kv_heads=1, head_dim=16, **options):
    arrays = normal(segments, heads, kv_heads, head_dim)
    got, given = run(device, profile, arrays, segments, head_dim, **options)
    dtype = "bfloat16" if profile.matrix_element == "f16" else "float32"
    for name, actual, exact in zip(
        ("o", "dq", "dk", "dv"), got, expect(got, given, segments, head_dim, **options), strict=True
    ):
        # A half of f16's last place for either factor is below the results' own in bfloat16.
        why = f"{name}: sums over keys and heads of terms of order 1"
        terms = 1.0 if name in ("dq", "dk") else 0.0
        assert_close(actual, exact, tolerance(dtype, segments.shape[1] * head_dim), why, terms)


# All of them pass through the same few shaders: these are compiled once.
ROWS = {
    "one short sample": np.ones((1, 5), int),
    "several tiles": np.ones((2, 70), int),
    "samples that end within tiles": packed(140, 31, 66, padding=9)[None],
    "samples of whole tiles": packed(128, 32, 64)[None],
    "padding in front and within": np.ones((2, 75), int),
    "blocks of padding": np.ones((1, 140), int),
}
ROWS["padding in front and within"][0, :37] = 0
ROWS["padding in front and within"][1, 38:44] = 0
ROWS["blocks of padding"][0, :97] = 0


@pytest.mark.full
@pytest.mark.parametrize("rows", ROWS)
def test_rows(device, halves, rows):
    check(device, halves, ROWS[rows])


@pytest.mark.slow
@pytest.mark.cover(shape=[NVIDIA])
@pytest.mark.parametrize("shape", [NVIDIA, MatrixShape(8, 16, 16, 16)])
def test_units_of_other_shapes(device, compiling, shape):
    """Weights of two units next to each other are a factor."""
    profile = replace(gpu_profile(shape, LARGE), attention_strips=2, least_workgroups=0)
    check(device, profile, ROWS["samples that end within tiles"])


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_long_heads_as_nvidias_units_take_them(device, compiling, head_dim):
    """Three strips of rows, turns that not all invocations load for, a forward of 256 in tiles."""
    profile = replace(gpu_profile(NVIDIA, Limits(1024, 32 << 10)), least_workgroups=0)
    check(device, profile, ROWS["samples that end within tiles"], head_dim=head_dim)


@pytest.mark.full
def test_blocks(device, halves):
    """Of a whole sample, and beyond a window; blocks begin before a tile's rows, or end after."""
    segments = packed(140, 31, 66, padding=9)[None]
    blocks = np.zeros((*segments.shape, 2), int)
    for begin, end in ((0, 31), (35, 60), (66, 72), (75, 131)):
        blocks[0, begin:end] = begin, end
    check(device, halves, segments, window=20, blocks=blocks)


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 20, 33, 69])
def test_windows(device, halves, window):
    check(device, halves, ROWS["several tiles"], window=window)
    check(device, halves, ROWS["samples that end within tiles"], window=window)


@pytest.mark.slow
@pytest.mark.cover(window=[33])
@pytest.mark.parametrize("window", [None, 33])
def test_sinks(device, halves, window):
    sinks = np.array([-40.0, 1.5, 8.0, 0.25])  # as float32 has them
    rows = ROWS["samples that end within tiles"]
    check(device, halves, rows, 4, 2, window=window, sinks=sinks)


def forward(device, profile, arrays, sinks, head_dim):
    """o, the log-sum-exps, and the arrays as the device had them, of one sample."""
    dtype = "bfloat16" if profile.matrix_element == "f16" else "float32"
    bench = Bench(device, dtype, profile)
    q, k, v = (bench.operand(a) for a in arrays)
    batch, given = bench.batch_of(1, len(arrays[0])), bench.given(sinks)
    o = attention(bench.graph, q, k, v, batch, head_dim, 0.3, sinks=given)
    (launch,) = (x for x in bench.graph.launches if x.path == "attention/forward_matrix.wgsl")
    got = bench.run(o, launch.tensors["lse"])
    return got[0], got[1].reshape(len(arrays[0]), -1), [rounded(a, dtype) for a in arrays]


def check_forward(device, profile, arrays, sinks, head_dim):
    """With one head of keys, o and the log-sum-exps against their formula."""
    o, lse, (q, k, v) = forward(device, profile, arrays, sinks, head_dim)
    seq, dtype = len(q), "bfloat16" if profile.matrix_element == "f16" else "float32"
    segments = np.ones((1, seq), int)
    sums = tolerance("float32", seq * head_dim)
    exact = reference.attention(q, k, v, segments, head_dim, 0.3, sinks=sinks)
    for head in range(len(sinks)):  # each has its own magnitude
        own = np.s_[:, head * head_dim : (head + 1) * head_dim]
        assert_close(o[own], exact[own], tolerance(dtype, seq * head_dim), "o")
        scores = np.where(np.tri(seq, dtype=bool), 0.3 * q[own] @ k.T, -np.inf)
        scores = np.column_stack([scores, np.full(seq, sinks[head])])
        assert_close(lse[:, head], np.logaddexp.reduce(scores, axis=1), sums, "log-sum-exps")


_KEY = np.arange(140)
# A score's part that each key has, and each query's factor of it.
RISES = {
    "in every turn": (0.2 * _KEY, 1.0),
    "in one row": (0.2 * _KEY, _KEY == 100),
    "at a late key": (30.0 * (_KEY == 90), 1.0),
    "after keys that are far below": (np.where(_KEY < 70, -80.0, 0.1 * _KEY), 1.0),
    "by less than a reference allows": (4.1 * (_KEY >= 32), 1.0),
    "by a little more": (4.25 * (_KEY >= 32), 1.0),
    "by what f16 does not hold": (5.0 * (_KEY >= 32), 1.0),
}


def rising(rises, heads, head_dim):
    """Queries, keys and values of which the first element makes the scores rise."""
    keys, queries = RISES[rises]
    random = np.random.default_rng(3)
    q, k, v = (random.normal(size=(140, n * head_dim)) for n in (heads, 1, 1))
    q, k = 0.1 * q, 0.1 * k  # which moves scores by a hundredth
    k[:, 0], q[:, ::head_dim] = keys, np.broadcast_to(queries, 140)[:, None] / 0.3
    return q, k, v


@pytest.mark.parametrize("rises", RISES)
def test_scores_that_rise(device, halves, rises):
    """References rise with them, and matrices of several columns are rescaled."""
    check_forward(device, halves, rising(rises, 2, 32), np.array([-50.0, 2.0]), 32)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "spans"), [(NVIDIA, 1), (replace(HALVES, threads=4), 2)])
def test_scores_that_rise_in_other_tilings(device, compiling, shape, spans):
    """Of one product for each strip; and where two workgroups share the results' columns."""
    profile = replace(gpu_profile(shape, Limits(1024, 32 << 10)), least_workgroups=0)
    assert matrix_tiling(profile, 64, "forward").spans == spans
    arrays = rising("in every turn", 2, 64)
    check_forward(device, profile, arrays, np.array([-50.0, 2.0]), 64)


def test_sinks_above_all_scores(device, halves):
    """Results are small, but not less precise."""
    arrays = rising("by a little more", 2, 32)
    check_forward(device, halves, arrays, np.array([12.0, 60.0]), 32)


@pytest.mark.full
def test_heads_that_share_keys_apart_and_a_softcap(device, halves):
    """Columns that two subgroups cannot share evenly, too."""
    profile = replace(halves, least_workgroups=1024)
    check(device, profile, ROWS["samples that end within tiles"], 4, 2, 24, softcap=2.0)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e6, 1e30])
def test_gradients_of_any_size_keep_their_precision(device, halves, size):
    """As much as at 1, to which all of the backward's numbers are brought by powers of two."""
    segments = ROWS["several tiles"]
    arrays = normal(segments, 2, 1, 16)
    arrays[3] *= size
    arrays[3][70:] *= 1e-4
    got, given = run(device, halves, arrays, segments, 16)
    exact = expect(got, given, segments, 16)
    for actual, expected in zip(got[1:], exact[1:], strict=True):
        for rows in (slice(0, 70), slice(70, 140)):
            largest = np.abs(expected[rows]).max()
            assert np.abs(actual[rows] - expected[rows]).max() < 2**-7 * largest


def test_the_last_may_be_the_largest(device, halves):
    """Beyond the first rows whose sizes are told together."""
    segments = ROWS["several tiles"]
    arrays = normal(segments, 2, 1, 16)
    last = np.arange(140) % 70 >= 64
    arrays[2][last] *= 1e3
    arrays[3][last] *= 1e6
    got, given = run(device, halves, arrays, segments, 16)
    for actual, expected in zip(got, expect(got, given, segments, 16), strict=True):
        assert np.abs(actual - expected).max() < 2**-6 * np.abs(expected).max()


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_values_of_any_size_keep_their_gradients(device, halves, size):
    segments = ROWS["several tiles"]
    arrays = normal(segments, 2, 1, 16)
    arrays[2] *= size
    got, given = run(device, halves, arrays, segments, 16)
    for actual, expected in zip(got, expect(got, given, segments, 16), strict=True):
        assert np.abs(actual - expected).max() < 2**-6 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.cover(halves=["f16"])
def test_even_weights_of_long_rows_are_not_lost(device, halves):
    """A weight of 1/2,000 is among f16's smallest, and some drivers take those for zero."""
    segments = np.ones((1, 2000), int)
    arrays = normal(segments, 1, 1, 16)
    arrays[0] *= 1e-3
    got, given = run(device, halves, arrays, segments, 16)
    for actual, expected in zip(got, expect(got, given, segments, 16), strict=True):
        assert np.abs(actual - expected).max() < 2**-7 * np.abs(expected).max()


def test_nan_stays_nan_and_others_are_as_they_were(device, halves):
    segments = ROWS["several tiles"]
    for source in range(3):
        arrays = normal(segments, 2, 1, 16)
        arrays[source][40, 3] = np.nan
        (o, dq, _, dv), _ = run(device, halves, arrays, segments, 16)
        head = np.s_[:16] if source == 0 else np.s_[:]
        if source == 2:  # a column of values
            assert np.isnan(o[40:70, 3]).all() and np.isnan(o[40:70, 19]).all()
            assert np.isfinite(o[:, [0, 1, 2, *range(4, 16)]]).all()
        else:
            spoilt = np.arange(140) == 40 if source == 0 else (np.arange(140) >= 40)
            spoilt &= np.arange(140) < 70
            assert np.isnan(o[spoilt, head]).all() and np.isfinite(o[~spoilt]).all()
            assert np.isnan(dq[spoilt]).any(axis=1).all()
            seen = np.arange(140) < (41 if source == 0 else 70)  # by those queries
            assert np.isnan(dv[seen]).all() and np.isfinite(dv[~seen]).all()


@pytest.mark.slow
def test_what_is_beyond_is_counted_once(device, halves):
    segments = ROWS["several tiles"]
    arrays = normal(segments, 2, 1, 16)
    arrays[0][3, 4], arrays[0][139, 30] = 1e5, -1e6
    arrays[1][2, 2], arrays[2][69, 15], arrays[2][100, 1] = -70000, 1e30, 65280
    storage = Storage("saturated", "test", 16, np.zeros(4, np.uint32))
    counts = vector("saturated", 4, "uint32", storage)
    run(device, halves, arrays, segments, 16, counts=counts)
    if halves.matrix_element == "f16":
        assert np.frombuffer(device.read(storage.buffer, 4), np.uint32) == [4]
    else:
        assert storage.buffer is None  # nothing ends there


def test_own_units(device):
    """Those that the device has."""
    shape = probe.matrix_units(device).shape
    if shape is None:
        return
    profile = gpu_profile(shape, device.limits)
    if shape.element == "f16":
        check(device, profile, ROWS["samples that end within tiles"], 4, 2, 64)


@pytest.mark.parametrize(
    ("shape", "head_dim", "name", "block", "others"),
    [
        (NVIDIA, 64, "forward", 64, 32),
        (NVIDIA, 64, "dkdv", 64, 32),
        (NVIDIA, 128, "forward", 64, 32),
        (NVIDIA, 128, "dq", 48, 32),
        (NVIDIA, 128, "dkdv", 32, 16),
        (NVIDIA, 80, "dq", 64, 32),
        (NVIDIA, 96, "dkdv", 64, 32),
        (MatrixShape(16, 16, 16, 64), 64, "dkdv", 64, 32),
        (MatrixShape(8, 16, 16, 16), 128, "dkdv", 32, 16),
        (MatrixShape(8, 8, 8, 32, "f32"), 64, "dq", 48, 32),
    ],
)
def test_cuts(shape, head_dim, name, block, others):
    """Within 32 KiB, and 1,024 invocations."""
    cut = matrix_tiling(gpu_profile(shape, LARGE), head_dim, name)
    assert (cut.block, cut.others) == (block, others)
    assert 16 * cut.memory <= 32 << 10 and cut.threads <= 512


@pytest.mark.parametrize("head_dim", [8, 24, 72, 512])
def test_heads_that_are_no_whole_products_are_tiled(head_dim):
    g = Graph("bfloat16", gpu_profile(NVIDIA, LARGE))
    q = g.operand("q", 70, head_dim)
    attention(g, q, q, q, make_batch_buffers(1, 70), head_dim, 0.125)
    assert [launch.path for launch in g.launches] == ["attention/forward_tiled.wgsl"]


@pytest.mark.parametrize(
    ("dtype", "element", "limits", "kind"),
    [
        ("bfloat16", "f16", LARGE, "matrix"),
        ("float32", "f16", LARGE, "tiled"),
        ("float32", "f32", LARGE, "matrix"),
        ("bfloat16", "f16", Limits(256, 16 << 10), "matrix"),
        ("bfloat16", "f16", Limits(128, 8 << 10), "plain"),
    ],
)
def test_what_takes_matrix_units(dtype, element, limits, kind):
    """float32 is not made coarser, and limits are kept."""
    profile = replace(gpu_profile(replace(NVIDIA, element=element), LARGE), limits=limits)
    g = Graph(dtype, profile)
    q = g.operand("q", 70, 64)
    attention(g, q, q, q, make_batch_buffers(1, 70), 64, 0.125)
    suffix = {"matrix": "_matrix", "tiled": "_tiled", "plain": ""}[kind]
    assert g.launches[-1].path == f"attention/forward{suffix}.wgsl"


def test_a_backward_may_be_tiled_where_the_forward_is_not():
    """They share the log-sum-exps."""
    g = Graph("float32", gpu_profile(MatrixShape(8, 8, 8, 32, "f32"), Limits(1024, 32 << 10)))
    q = g.operand("q", 70, 224)
    q.requires_grad = True
    o = attention(g, q, q, q, make_batch_buffers(1, 70), 224, 0.125)
    g.add_gradient(o, g.operand("do", 70, 224))
    g.backward()
    paths = [launch.path for launch in g.launches if launch.label != "attention/delta"]
    assert paths[0] == "attention/forward_matrix.wgsl"
    assert {"attention/dq_tiled.wgsl", "attention/dkdv_tiled.wgsl"} <= set(paths)
