"""What host memory a weight takes while it is loaded."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.selfcheck.cases.formats import FORMS

SHAPE = (16, 64)


@pytest.mark.parametrize(("mapped", "count"), [(False, 1), (False, 2), (False, 3), (True, 1)])
def test_a_matrix_and_two_of_its_quantized_experts_are_in_host_memory(mapped, count):
    expected, made = [], []
    layer = SimpleNamespace(as_stored=True, copied=0)

    def storage(name, label, nbytes, most=0):
        made.append(Storage(label, "base", nbytes))
        return made[-1]

    owner = SimpleNamespace(
        textures=False, _codebooks={}, max_binding=1 << 20, table=[],
        placement=SimpleNamespace(
            storage=storage, layer_of=lambda name: layer, expect_load=expected.append
        ),
        _reader=SimpleNamespace(find=lambda name: SimpleNamespace(is_mapped=mapped)),
    )  # fmt: skip
    names = [f"w{number}" for number in range(count)]
    WeightLayout._quantized(owner, "w", SHAPE, FORMS["Q4_K"], names)
    nbytes = sum(each.nbytes for each in made)
    assert expected == ([] if mapped else [4 * 16 * 64 + min(count, 2) * nbytes])
    assert layer.as_stored == mapped
    assert [part for part, _ in owner.table[0].parts] == names
