import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_checked, assert_formula

from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.reference import norms as reference
from qlora_wgpu.selfcheck.cases.common import Exact, normal
from qlora_wgpu.selfcheck.cases.norms import check_only_norm

EPS = 0.3  # so much that it counts beside squares of numbers of order 1
SHAPES = [(37, 130), (1, 5), (3, 12), (9, 72)]


def check(device, profile, dtype, norm, formula, shape, rest, accumulate):
    """A norm of x, which something else may read, too."""

    def op(g, x, *rest):
        return [norm(g, x, *rest), x][: 1 + accumulate]

    def exact(x, *rest):
        return (formula(x, *rest), x)[: 1 + accumulate]

    x = Exact(3 * normal("x", *shape) + 1)
    assert_formula(Bench(device, dtype, PROFILES[profile]), op, exact, [x], *rest, exact=True)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm(device, profile, dtype, shape, accumulate):
    rest = normal("weight", shape[1]), EPS
    check(device, profile, dtype, rms_norm, reference.rms_norm, shape, rest, accumulate)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_a_residual_is_added_in_float32(device, profile, dtype):
    def op(g, x, residual, weight):
        y = rms_norm(g, x, weight, EPS, residual)
        assert y.dtype == "float32"
        return y

    def formula(x, residual, weight):
        return reference.rms_norm(x, weight, EPS) + residual

    inputs = [Exact(normal(name, 37, 20)) for name in ("x", "skip")]
    bench = Bench(device, dtype, PROFILES[profile])
    assert_formula(bench, op, formula, inputs, normal("weight", 20), exact=True)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_what_is_made_again_has_the_same_bits(device, profile, dtype):
    bench = assert_checked(device, profile, dtype, check_only_norm)
    assert "rms_norm/again.wgsl" in bench.shaders


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_layer_norm(device, profile, dtype, shape, with_bias, accumulate):
    def norm(g, x, weight, bias=None):
        return layer_norm(g, x, weight, bias, EPS)

    def formula(x, weight, bias=0.0):
        return reference.layer_norm(x, weight, EPS, bias)

    rest = normal("weight", shape[1]), *[normal("bias", shape[1])] * with_bias
    check(device, profile, dtype, norm, formula, shape, rest, accumulate)
