"""Trained rows of an embedding and a head; their checks compare with NumPy on every variant."""

import numpy as np
import pytest
from support.harness import (
    PROFILES,
    VARIANTS,
    Bench,
    assert_checked,
    assert_close,
    rounded,
    tolerance,
)

from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.modules import DenseMatrix
from qlora_wgpu.ops.trained import TrainableTokens, overwrite
from qlora_wgpu.ops.trained_gradients import sum_up
from qlora_wgpu.reference import loss as reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases import trained
from qlora_wgpu.selfcheck.cases.common import arguments_of

VOCAB, COLUMNS, SEQ = 83, 20, 61


def looked_up(bench, tokens, ids, dy, dtype="float32", padding=None):
    """The embedding's rows, and the gradient of those that are trained, which was 3."""
    rng = np.random.default_rng(12)
    weight, rows = (
        rng.standard_normal((VOCAB, COLUMNS)),
        rng.standard_normal((len(tokens), COLUMNS)),
    )
    gradient = bench.given(np.full(rows.shape, 3.0))
    trained = TrainableTokens("embed", tokens, bench.given(rows), gradient, VOCAB, padding)
    pieces = tuple((i, bench.operand(weight[i : i + 24])) for i in range(0, VOCAB, 24))
    overwrite(bench.graph, trained, pieces)
    matrix = DenseMatrix(VOCAB, COLUMNS, pieces, trained)
    y = embedding(bench.graph, matrix, bench.batch_of(1, SEQ, ids=ids), 0.5)
    bench.gradients(y, bench.given(dy, dtype), trained.rows)
    sum_up(bench.graph, trained)
    got, drows = bench.run(y, gradient)
    own, rows = rounded(weight, bench.dtype), rounded(rows, bench.dtype)
    held = reference.overwritten(own, np.array(tokens), rows)
    assert np.array_equal(got, 0.5 * held[ids])
    return drows


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("padding", [None, 23])
def test_lookups(device, profile, dtype, padding):
    """Tokens at the ends of pieces, one that fills half of the batch, and one that is nowhere."""
    rng, tokens = np.random.default_rng(11), (82, 0, 23, 24, 50)
    ids = rng.integers(0, VOCAB, SEQ)
    ids[::2], ids[ids == 50], ids[5] = 23, 51, 82
    dy = rng.standard_normal((SEQ, COLUMNS))
    bench = Bench(device, dtype, PROFILES[profile])
    got = looked_up(bench, tokens, ids, dy, dtype, padding)
    given = np.zeros((VOCAB, COLUMNS)), np.array(tokens), np.zeros((len(tokens), COLUMNS))

    def exactly(*given):
        return reference.lookup(reference.overwritten(*given), ids, 0.5, padding)

    (exact,) = grads(exactly, rounded(dy, dtype), *given, of=(2,))
    assert_close(got, 3.0 + exact, tolerance("float32"), "sums of 31 terms in float32")
    assert np.array_equal(got[4], np.full(COLUMNS, 3.0))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("token", [0, 7])
def test_every_token_alike(device, profile, token):
    dy = np.random.default_rng(13).standard_normal((SEQ, COLUMNS))
    bench = Bench(device, "float32", PROFILES[profile])
    got = looked_up(bench, (token, 40), np.full(SEQ, token), dy)
    assert_close(got[0], 3.0 + 0.5 * dy.sum(0), tolerance("float32"), "61 terms in float32")
    assert (got[1] == 3.0).all()


def test_a_row_of_one_token_is_in_its_order(device):
    """The sum goes from the first place to the last: with the bits of float32 so."""
    ids = np.zeros(SEQ, int)
    dy = np.random.default_rng(14).standard_normal((SEQ, COLUMNS)).astype(np.float32)
    total = np.zeros(COLUMNS, np.float32)
    for row in dy:
        total += row
    for profile in PROFILES.values():
        got = looked_up(Bench(device, "float32", profile), (0,), ids, dy)
        assert np.array_equal(got[0], np.float32(3.0) + np.float32(0.5) * total)


@pytest.mark.quick(profile=["cpu"])
@pytest.mark.parametrize("arguments", arguments_of(trained.check_trained_rows))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_rows_that_both_ends_share(device, profile, dtype, arguments):
    assert_checked(device, profile, dtype, trained.check_trained_rows, *arguments)


@pytest.mark.parametrize("arguments", arguments_of(trained.check_trained_rows_looked_up))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_rows_of_a_matrix_in_host_memory(device, profile, dtype, arguments):
    assert_checked(device, profile, dtype, trained.check_trained_rows_looked_up, *arguments)


@pytest.mark.quick(profile=["gpu"])
@pytest.mark.parametrize("arguments", arguments_of(trained.check_trained_matrix))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_a_whole_matrix(device, profile, dtype, arguments):
    assert_checked(device, profile, dtype, trained.check_trained_matrix, *arguments)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_a_whole_embedding_that_is_no_head(device, profile, dtype):
    assert_checked(device, profile, dtype, trained.check_trained_matrix_alone)
