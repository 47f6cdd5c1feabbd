"""Which ways to write a product are explored, in which order, and what is told of them."""

import re
from dataclasses import fields
from types import ModuleType, SimpleNamespace

import pytest
from bench.parts import BENCHMARKS

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

CARD, LIMITS = MatrixShape(16, 16, 16, 32), Limits(1024, 49_152)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import explore

    return explore


def test_any_beginning_has_todays_kernel_and_each_choice(own: ModuleType) -> None:
    found = own.ways(CARD, LIMITS)
    assert found[0] == own.Way() and len(set(found)) == len(found) >= 1000
    for name in (field.name for field in fields(own.Way)):
        values = {getattr(way, name) for way in found}
        if name not in ("decodes", "turned", "parts"):
            assert {getattr(way, name) for way in found[:120]} == values
    assert {(way.turned, way.decodes) for way in found} == {(0, 0), (0, 1), (1, 0)}


def test_shaders_take_the_memory_that_limits_are_compared_with(own: ModuleType) -> None:
    found = own.ways(CARD, LIMITS)
    for way in found[:300]:
        arrays = re.findall(
            r"var<workgroup> \w+: array<vec(\d)<u32>, (\d+)>", own.kernel(way, CARD)
        )
        nbytes = sum(4 * int(words) * int(units) for words, units in arrays)
        assert len(arrays) == 2 and nbytes <= LIMITS.workgroup_bytes
        assert not way.problem(CARD, Limits(1024, nbytes))
        assert "limits" in way.problem(CARD, Limits(1024, nbytes - 1))


def test_sums_are_cut_only_where_cores_would_be_idle(own: ModuleType) -> None:
    cut = own.Way(parts=2)
    assert cut.fits(CARD, 1024, 2048, 8192) and not cut.fits(CARD, 4096, 8192, 2048)
    assert own.Way().fits(CARD, 4096, 8192, 2048) and not own.Way().fits(CARD, 100, 8192, 2048)


def test_the_first_shape_decides_for_each_number_of_rows(own: ModuleType) -> None:
    low = own.Way(groups_m=1, fragments_m=1)  # of 16 rows
    explorer = SimpleNamespace(unit=CARD)
    found = own.candidates(explorer, [own.Way(), low, own.Way(parts=4)], [64, 1024], own.SHAPES)
    sizes = {each.way: [[name for name, _ in group] for group in each.sizes] for each in found}
    assert [list(map(len, own_sizes)) for own_sizes in sizes.values()] == [[0, 5], [5, 5], [0, 3]]
    assert [group[0] for group in sizes[low]] == ["64x4096x4096", "1024x4096x4096"]
    assert len({each.name for each in found}) == 3


def test_a_device_without_matrix_units_is_told(own: ModuleType, device: Device) -> None:
    if not device.backend.matrix_shapes(device.gpu):
        with pytest.raises(SystemExit, match="has no matrix units for f16"):
            own.Explorer(device)
