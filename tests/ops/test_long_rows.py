"""Software GPUs leave loops after 65,535 turns without a word: batches of more are refused."""

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_close, tolerance

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.delta_net import gated_delta_rule
from qlora_wgpu.ops.routing import route
from qlora_wgpu.ops.trained_gradients import following_places


def attend(bench, tokens, group, window=None):
    q, k, v = (bench.operand(np.zeros((tokens, n)), grad=True) for n in (8 * group, 8, 8))
    batch = bench.batch_of(1, tokens, segments=np.ones((1, tokens), int))
    o = attention(bench.graph, q, k, v, batch, 8, 1.0, window=window)
    bench.gradients(o, bench.given(np.zeros((tokens, 8 * group))), q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "most"), [("cpu", 65_535 // 8), ("texture", 65_528)])
def test_attention_counts_its_turns(device, profile, most):
    """A key is looked at by all queries of all heads of its group."""
    attend(Bench(device, "float32", PROFILES[profile]), most, 8)
    with pytest.raises(DeviceError, match=r"attention/dkdv needs 6\d,\d{3} loop .* use a GPU"):
        attend(Bench(device, "float32", PROFILES[profile]), most + 16, 8)
    attend(Bench(device, "float32", PROFILES[profile]), most + 16, 8, window=100)
    attend(Bench(device, "float32", PROFILES["gpu"]), most + 16, 8)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["cpu", "texture"])
def test_states_count_their_turns(device, profile):
    bench = Bench(device, "float32", PROFILES[profile])

    def pass_over(tokens):
        q, k, v = (bench.operand(np.zeros((tokens, 128))) for _ in range(3))
        decay, beta = (bench.given(np.zeros((tokens, 1))) for _ in range(2))
        batch = bench.batch_of(1, tokens, segments=np.ones((1, tokens), int))
        gated_delta_rule(bench.graph, q, k, v, decay, beta, batch, 1, 1, 128, 128)

    pass_over(16_384)
    with pytest.raises(DeviceError, match="gated_delta/states needs"):
        pass_over(100_000)


@pytest.mark.parametrize("profile", PROFILES)
def test_magnitudes_of_many_rows(device, profile):
    """Eight columns an invocation, one after the other, over all rows."""
    rows, columns = 9_001, 140
    rng = np.random.default_rng(2)
    dy, z = rng.standard_normal((2, rows, columns))
    inverse = rng.uniform(0.5, 2.0, columns)
    bench = Bench(device, "float32", PROFILES[profile])
    g = bench.given(np.zeros((1, columns)))
    tz = bench.given(z)
    bench.graph.launch(
        "dora/magnitude_grad.wgsl",
        columns,
        {"dy": bench.given(dy), "z": tz, "inverse": bench.given(inverse), "g": g},
        {"rows": rows, "columns": columns, "stride": tz.stride},
    )
    (got,) = bench.run(g)
    assert_close(got, (inverse * (dy * z).sum(0))[None], tolerance("float32", rows), "over rows")


@pytest.mark.parametrize("profile", ["cpu", "texture"])
def test_a_row_of_very_many_experts_is_an_invocations_alone(device, profile):
    """Eight rows at a time would be 8 · 17 · 700 turns."""
    rows, experts, top_k = 64, 700, 16
    logits = np.random.default_rng(3).standard_normal((rows, experts)).astype(np.float32)
    bench = Bench(device, "float32", PROFILES[profile])
    routing = route(bench.graph, bench.given(logits), top_k, normalized=True)
    (got,) = bench.run(routing.weights)
    highest = -np.sort(-logits, axis=1)[:, :top_k]
    weights = np.exp(highest - highest[:, :1])
    expected = weights / weights.sum(1, keepdims=True)
    assert_close(got, expected, tolerance("float32", experts), "weights")


def test_tokens_that_are_trained_count_their_turns(device):
    """A token's places in a batch are looked for one after the other."""
    bench = Bench(device, "float32", PROFILES["cpu"])
    ids = bench.graph.integers("ids", 70_000)
    with pytest.raises(DeviceError, match="trained_rows/following needs 70,000 loop iterations"):
        following_places(bench.graph, ids, 70_000, None)
