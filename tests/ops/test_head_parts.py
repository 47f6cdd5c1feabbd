import numpy as np
from support.harness import PROFILES, Bench, assert_close, rounded

from qlora_wgpu.ops.columns import HeadPart, head_parts

ROWS, HEADS, HEAD_DIM = 23, 3, 18


def test_two_parts_of_one_matrix(device):
    """As latent attention's queries are put together: both gradients add up."""
    rng = np.random.default_rng(4)
    bench = Bench(device, "float32", PROFILES["cpu"])
    array, dy = rng.standard_normal((ROWS, HEADS * 14)), rng.standard_normal((ROWS, HEADS * 14))
    x = bench.operand(array, grad=True)
    y = head_parts(bench.graph, [HeadPart(x, 14, 5, 9), HeadPart(x, 14, 0, 5)], HEADS, 14)
    got_y, got = bench.run(y, *bench.gradients(y, bench.given(dy), x))
    exact, back = (rounded(a, "float32").reshape(ROWS, HEADS, 14) for a in (array, dy))
    assert_close(got_y, np.roll(exact, -5, 2).reshape(ROWS, -1), 0.0, "copied")
    assert_close(got, np.roll(back, 5, 2).reshape(ROWS, -1), 0.0, "copied")
