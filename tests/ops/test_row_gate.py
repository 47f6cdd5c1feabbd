import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_formula

from qlora_wgpu.ops.pointwise import row_gate
from qlora_wgpu.reference import pointwise as reference
from qlora_wgpu.selfcheck.cases.common import Exact, normal


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("added", [True, False])
def test_row_gate(device, profile, dtype, kind, added):
    """Of short rows, with a residual and without."""
    gate = 3 * normal("gate", 37, 1)
    gate[:2] = [[-95.0], [95.0]]  # where exp is far from one

    def formula(x, gate, *residual):
        return reference.row_gate(x, gate) + sum(residual)

    inputs = [normal("x", 37, 45), Exact(gate), *[Exact(normal("skip", 37, 45))] * added]
    bench = Bench(device, dtype, PROFILES[profile])
    assert_formula(bench, row_gate, formula, inputs, exact=kind == "float32")
