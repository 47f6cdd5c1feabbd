"""What LoRA on the head needs beside its check, which compares with NumPy on every variant."""

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, rounded

from qlora_wgpu.ops.label_rows import transposed

LABELS = 21


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("first", "count", "columns"), [(0, 13, 9), (16, 7, 24), (16, 16, 5)])
def test_transposed(device, profile, dtype, weighted, first, count, columns):
    """Rows with no label are zeros, though NaN is in them."""
    rng = np.random.default_rng(5)
    x, factors = rng.standard_normal((count, columns)), rng.uniform(0.5, 2.0, 40)
    here = max(min(LABELS - first, count), 0)
    x[here:] = np.nan
    bench = Bench(device, dtype, PROFILES[profile])
    targets = np.full((1, 40), -100)
    targets[0, :LABELS] = 1
    batch = bench.batch_of(1, 40, targets=targets)
    held = bench.given(factors) if weighted else None
    (got,) = bench.run(transposed(bench.graph, bench.operand(x), first, batch, held))
    exact = np.zeros((columns, count))
    exact[:, :here] = rounded(x[:here], dtype).T
    if weighted:
        exact[:, :here] *= factors.astype(np.float32)[first : first + here]
        exact = rounded(exact, dtype)
    assert np.array_equal(got, exact.astype(np.float32))
