import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, rounded

from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.ops.loss import Objective, _Loss, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.selfcheck import runner
from qlora_wgpu.selfcheck.cases.linear import dense
from qlora_wgpu.selfcheck.cases.loss import compare_loss


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    monkeypatch.setattr(runner, "SUMS", 4e-6)  # sums of float32 in any order


LABELS = {"none": 0.0, "few": 0.1, "all": 1.0}


def run(
    device,
    profile,
    dtype,
    rows,
    vocab,
    columns,
    share,
    *,
    shard=None,
    smoothing=0.0,
    z_loss=0.0,
    other=None,
    weighted=False,
    confidence=False,
    **head_options,
):
    rng = np.random.default_rng(10)
    hidden, head = rng.standard_normal((rows, columns)), rng.standard_normal((vocab, columns))
    targets = np.where(rng.random(rows) < share, rng.integers(0, vocab, rows), -100)
    likeliest = rounded(hidden, dtype) @ rounded(head, dtype).T
    chosen = (targets != -100) & (rng.random(rows) < 0.4)  # labels that the model predicts
    targets[chosen] = likeliest.argmax(axis=1)[chosen]
    if share == 0.1:
        targets[rows // 2] = vocab - 1
    bench = Bench(device, dtype, profile)
    bias = rounded(head_options.pop("bias", None), "float32") if "bias" in head_options else None
    given = None if bias is None else bench.given(bias[None])
    module = Head(dense(bench, head, shard)[0], bias=given, **head_options)
    before = None if other is None else bench.given(np.ones_like(hidden), other)
    objective = Objective(smoothing, z_loss, weighted, confidence)
    start = 2.0, 3.0, 0.0, 0.0, 4.0
    compare_loss(bench, module, hidden, head, targets[None], objective, start, bias, before=before)
    assert bench.excess <= 1.0, bench.worst


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("labels", list(LABELS))
def test_labels(device, profile, dtype, labels):
    run(device, PROFILES[profile], dtype, 37, 331, 20, LABELS[labels])


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_chunks_of_rows_and_shards_of_the_head(device, profile, dtype):
    few_rows = dataclasses.replace(PROFILES[profile], logits_bytes=16 * 4 * 83)
    run(device, few_rows, dtype, 50, 83, 12, 0.7, shard=24)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_scaled_and_capped_logits(device, profile, dtype):
    run(device, PROFILES[profile], dtype, 37, 331, 20, 0.7, scale=0.4, softcap=3.0)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.02), (0.3, 0.1)])
def test_smoothed_labels_and_z_loss(device, profile, dtype, softcap, smoothing, z_loss):
    objective = {"smoothing": smoothing, "z_loss": z_loss}
    run(device, PROFILES[profile], dtype, 37, 331, 20, 0.7, softcap=softcap, **objective)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("weighted", "confidence"), [(True, False), (False, True), (True, True)])
def test_weights_of_rows(device, profile, dtype, weighted, confidence):
    """In several chunks of rows, through a capped head."""
    few_rows = dataclasses.replace(PROFILES[profile], logits_bytes=16 * 4 * 83)
    options = {"weighted": weighted, "confidence": confidence}
    run(device, few_rows, dtype, 50, 83, 12, 0.7, softcap=3.0, **options)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("other", DTYPES)
def test_hidden_states_that_something_else_reads(device, profile, dtype, other):
    run(device, PROFILES[profile], dtype, 37, 83, 20, 0.7, other=other)


def test_blocks_of_the_head(device):
    blocks = dataclasses.replace(PROFILES["cpu"], head_block=256)
    run(device, blocks, "float32", 21, 700, 12, 0.7)


@pytest.mark.parametrize("kind", ["register", "tiled"])
def test_a_long_vocabulary_is_cut_into_parts(device, kind):
    profile = dataclasses.replace(PROFILES["gpu"], gemm_kind=kind)
    run(device, profile, "float32", 9, 4099, 68, 0.7)
    run(device, profile, "bfloat16", 9, 4099, 68, 0.7, shard=2056)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [256, 1024])
def test_rows_as_long_as_large_vocabularies(device, dtype, threads):
    """As many threads share them as a GPU allows."""
    profile = dataclasses.replace(PROFILES["gpu"], limits=Limits(threads, 32_768))
    run(device, profile, dtype, 5, 16_421, 12, 0.7, smoothing=0.1, z_loss=0.01)


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize(("first", "right"), [(0, 1), (5, 1), (33, 1), (41, 0)])
def test_of_logits_that_are_equally_large_the_first_is_predicted(device, profile, first, right):
    """As TRL has it; blocks of the vocabulary are 32 rows."""
    bench = Bench(device, "float32", dataclasses.replace(PROFILES[profile], head_block=32))
    head = np.full((83, 12), 0.5)
    head[first : first + 40] = 1.0
    targets = np.array([0, 5, 33, 39, 40, 82, -100])
    stats = bench.given(np.zeros((1, 5)))
    batch = bench.batch_of(1, 7, targets=targets)
    matrix = DenseMatrix(83, 12, ((0, bench.operand(head)),))
    hidden = bench.operand(np.ones((7, 12)))
    cross_entropy(bench.graph, hidden, Head(matrix), batch, stats, gradient=False)
    (got,) = bench.run(stats)
    assert (got[0, 1], got[0, 4]) == (6, right)


@pytest.mark.parametrize("smoothing", [0.0, 1e-30])
def test_losses_of_tokens_that_are_almost_certain(device, smoothing):
    """Beside logits of 32 a loss of 1e-4 loses digits that its probability has."""
    vocab, gaps = 2, np.array([8.0, 9.0, 10.0])
    hidden, head = np.zeros((3, 8)), np.zeros((vocab, 8))
    hidden[:, 0], hidden[:, 1] = 1.0, gaps
    head[:, 0], head[1:, 1] = 32.3, -1.0
    bench = Bench(device, "float32", device.profile)
    stats = bench.given(np.zeros((1, 5)))
    th, rows = bench.operand(hidden), bench.operand(head)
    batch = bench.batch_of(1, 3, targets=np.zeros(3, int))
    cross_entropy(
        bench.graph, th, Head(DenseMatrix(vocab, 8, ((0, rows),))), batch, stats, gradient=False,
        objective=Objective(smoothing, 0.0, False, False),
    )  # fmt: skip
    (got,) = bench.run(stats)
    exact = np.log1p(np.exp(-gaps)).sum()
    assert abs(got[0, 0] - exact) < 3 * 2.0**-24  # half a digit of the sums of exponentials


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shard", [None, 64])
def test_a_bias_of_the_head(device, profile, dtype, shard):
    """A further column of the head, which a column of ones meets."""
    bias = 3 * np.random.default_rng(12).standard_normal(203)
    run(device, PROFILES[profile], dtype, 21, 203, 36, 1.0, shard=shard, scale=0.5, bias=bias)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "step", "chunks"), [
    (70, 32, [(0, 32), (32, 32), (64, 6)]), (64, 32, [(0, 32), (32, 32)]), (5, 32, [(0, 5)])
])  # fmt: skip
def test_chunks_end_with_the_rows(rows, step, chunks):
    loss = SimpleNamespace(_batch=SimpleNamespace(rows=rows))
    assert _Loss._chunks(loss, step) == chunks
