"""Chunks of a batch's label rows: taken, put back, and turned."""

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, Bench, rounded

from qlora_wgpu.ops.label_rows import gather, scatter, transposed

ROWS, COLUMNS = 23, 20
LABELLED = np.array([1, 2, 5, 6, 9, 11, 12, 17, 20, 21, 22])
CHUNKS = {"the first": (0, 4), "one between": (4, 4), "the last, in part": (8, 4)}


def traced(device, profile, dtype):
    """A bench, its batch, what its rows hold, and that as a tensor."""
    bench = Bench(device, dtype, PROFILES[profile])
    targets = np.full(ROWS, -100)
    targets[LABELLED] = 1
    x = rounded(np.random.default_rng(2).standard_normal((ROWS, COLUMNS)), dtype)
    return bench, bench.batch_of(1, ROWS, targets=targets), x, bench.operand(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_chunk_is_taken_with_zeros_behind_the_last_label(device, profile, dtype, chunk):
    first, count = CHUNKS[chunk]
    bench, batch, x, given = traced(device, profile, dtype)
    (got,) = bench.run(gather(bench.graph, given, count, first, batch))
    own = LABELLED[first : first + count]
    assert np.array_equal(got, np.pad(x[own], ((0, count - len(own)), (0, 0))))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_chunk_is_put_back_and_every_other_row_stays(device, profile, chunk):
    first, count = CHUNKS[chunk]
    bench, batch, x, given = traced(device, profile, "float32")
    own = LABELLED[first : first + count]
    rows = np.random.default_rng(3).standard_normal((count, COLUMNS)).astype(np.float32)
    scatter(bench.graph, bench.given(rows), given, first, batch)
    (got,) = bench.run(given)
    x[own] = rows[: len(own)]
    assert np.array_equal(got, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("columns", [None, (4, 9)])
def test_a_chunk_becomes_columns(device, profile, dtype, chunk, columns):
    """Each label row times a factor of its own; of some columns, or of all."""
    first, count = CHUNKS[chunk]
    bench, batch, x, _ = traced(device, profile, dtype)
    factors, given = 1.0 + np.arange(len(LABELLED)), bench.operand(x[:count])
    (got,) = bench.run(transposed(bench.graph, given, first, batch, bench.given(factors), columns))
    begin, width = columns or (0, COLUMNS)
    expected, own = np.zeros((count, width)), factors[first : first + count, None]
    expected[: len(own)] = x[: len(own), begin : begin + width] * own
    assert np.array_equal(got, rounded(expected.T, dtype))
