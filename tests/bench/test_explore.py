"""Which ways to write a product are explored, in which order, and what is told of them."""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType

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


def test_wrong_ways_are_counted_and_never_the_best(own: ModuleType, tmp_path: Path) -> None:
    rows = [
        {
            "key": str(i),
            "shape": "a",
            "way": asdict(own.Way(steps=steps)),
            "wrong": wrong,
            "tflops": t,
        }
        for i, (steps, wrong, t) in enumerate([(4, 0, 1.0), (2, 9, 3.0), (8, 0, 2.0)])
    ]
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [line.split() for line in own.summary(path)] == [
        ["a:", "3", "ways,", "1", "wrong"],
        ["2.000", "TFLOP/s", "{'steps':", "8}"],
        ["1.000", "TFLOP/s", "as", "today"],
    ]


def test_a_device_without_matrix_units_is_told(own: ModuleType, device: Device) -> None:
    if not device.backend.matrix_shapes(device.gpu):
        with pytest.raises(SystemExit, match="has no matrix units for f16"):
            own.Explorer(device)
