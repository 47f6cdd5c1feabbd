"""Rows that AltUp's ops and sparse gates meet at the edges: without any spread, or all zeros."""

import numpy as np
from support.harness import PROFILES, Bench

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import matrix
from qlora_wgpu.ops.altup import rms_match, unstacked
from qlora_wgpu.ops.pointwise import sparse_glu


def test_a_gate_without_spread_has_no_gradient(device):
    """PyTorch's standard deviation has the slope 0 there, too."""
    bench = Bench(device, "float32", PROFILES["cpu"])
    gate, up = np.full((2, 20), 0.5), np.ones((2, 20))
    tensors = [bench.operand(a, grad=True) for a in (gate, up)]
    y = sparse_glu(bench.graph, *tensors, "gelu_pytorch_tanh", 0.5)
    results = bench.run(y, *bench.gradients(y, bench.given(np.ones_like(up)), *tensors))
    assert all(np.array_equal(array, np.zeros_like(up)) for array in results)


def test_rows_of_zeros_match_nothing(device):
    """Neither a stream of zeros nor one that is brought to its magnitude makes NaN."""
    bench = Bench(device, "float32", PROFILES["cpu"])
    zeros, ones = np.zeros((1, 20)), np.ones((1, 20))
    x, like = (
        bench.given(np.concatenate(rows), grad=True) for rows in ((zeros, ones), (ones, zeros))
    )
    y = rms_match(bench.graph, x, like, 1e-5)
    got, dx, dlike = bench.run(y, *bench.gradients(y, bench.given(np.ones((2, 20))), x, like))
    np.testing.assert_array_equal(got, 0.0)
    np.testing.assert_array_equal(dlike, 0.0)
    np.testing.assert_allclose(dx[0], np.sqrt(1e5), rtol=1e-6)
    np.testing.assert_array_equal(dx[1], 0.0)


def test_what_was_taken_apart_is_recorded_as_it_was():
    """A caller that adds a stream to the list of the others changes no gradient."""
    g = Graph("float32", PROFILES["cpu"])
    assert isinstance(unstacked(g, matrix("x", 6, 20, "float32"), 3), tuple)
