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

from qlora_wgpu.ops.causal_conv import causal_conv
from qlora_wgpu.reference import causal_conv as reference
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.generation import check_causal_conv_step

# A whole row, and samples that are packed, of which the first has the number of the one before it.
SEGMENTS = np.array([[1] * 19, [1] * 5 + [0] + [7] * 2 + [9] * 7 + [0] * 4])


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("channels", "taps", "has_bias"), [(24, 4, True), (8, 7, False)])
def test_causal_conv(device, profile, dtype, channels, taps, has_bias):
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, 38, channels))
    weight, bias = rng.standard_normal((channels, taps)), rng.standard_normal(channels) * has_bias
    bench = Bench(device, dtype, PROFILES[profile])
    tx, batch = bench.operand(x, grad=True), bench.batch_of(2, 19, segments=SEGMENTS)
    given = bench.given(bias) if has_bias else None
    y = causal_conv(bench.graph, tx, bench.given(weight), given, batch)
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy), tx))
    x, dy, weight, bias = rounded(x, dtype), *(rounded(a, "float32") for a in (dy, weight, bias))
    bound, why = tolerance(dtype, taps), "sums of a few products, one rounding"
    assert_close(got_y, reference.forward(x, weight, bias, SEGMENTS), bound, why)
    assert_close(got_dx, reference.backward(dy, x, weight, bias, SEGMENTS), bound, why)


@pytest.mark.parametrize("arguments", arguments_of(check_causal_conv_step))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_new_tokens_go_on_from_what_is_kept_of_the_prompt(device, profile, dtype, arguments):
    assert_checked(device, profile, dtype, check_causal_conv_step, *arguments)
