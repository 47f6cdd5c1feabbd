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

from qlora_wgpu.ops.activation import activation as activate
from qlora_wgpu.ops.glu import glu, sigmoid_gate
from qlora_wgpu.reference import activation as activations
from qlora_wgpu.reference import glu as reference
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.elementwise import check_activation

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "relu2")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "sigmoid"])
@pytest.mark.parametrize("shape", [(1, 5), (37, 52)])
def test_glu(device, profile, dtype, activation, shape):
    rng = np.random.default_rng(3)
    gate, up, dy = (4 * rng.standard_normal(shape) for _ in range(3))
    gate.flat[:4] = [-90.0, 90.0, 0.0, -0.0]  # where a careless exp overflows
    bench = Bench(device, dtype, PROFILES[profile])
    tg, tu = bench.operand(gate, grad=True), bench.operand(up, grad=True)
    is_gate = activation == "sigmoid"
    y = sigmoid_gate(bench.graph, tu, tg) if is_gate else glu(bench.graph, tg, tu, activation)
    outputs = bench.gradients(y, bench.given(dy), tg, tu)
    got_y, got_dgate, got_dup = bench.run(y, *outputs)
    gate, up, dy = rounded(gate, dtype), rounded(up, dtype), rounded(dy, "float32")
    expected = reference.backward(dy, gate, up, activation)
    why = "exp is good to 1e-6, one rounding"
    assert_close(got_y, reference.forward(gate, up, activation), tolerance(dtype), why)
    assert_close(got_dgate, expected[0], tolerance(dtype), why)
    assert_close(got_dup, expected[1], tolerance(dtype), why)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(device, profile, dtype, activation):
    rng = np.random.default_rng(4)
    x, dy = 2 * rng.standard_normal((37, 52)), rng.standard_normal((37, 52))
    x.flat[:6] = [-90.0, 90.0, 0.0, -0.0, 2.83, -2.82]  # also where two forms of erf meet
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    y = activate(bench.graph, tx, activation)
    (dx,) = bench.gradients(y, bench.given(dy), tx)
    got_y, got_dx = bench.run(y, dx)
    x, dy = rounded(x, dtype), rounded(dy, "float32")
    why = "exp is good to 1e-6, one rounding"
    assert_close(got_y, activations.forward(x, activation), tolerance(dtype), why)
    assert_close(got_dx, dy * activations.slope(x, activation), tolerance(dtype), why)


def test_every_activation_in_turn(device):
    """Of the kinds of kernels, those that are compiled in no time."""
    for arguments in arguments_of(check_activation):
        assert_checked(device, "cpu", "bfloat16", check_activation, *arguments)
