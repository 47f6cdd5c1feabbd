"""Parameters that a shader reads all at once."""

import numpy as np
import pytest

from qlora_wgpu.gpu.dawn import Dawn
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgpu_native import WgpuNative
from qlora_wgpu.gpu.wgsl import hoist_uniform_loads, load_shader

FILL = load_shader("tensor/fill.wgsl", (("ELEMENTS", 1), ("FLAT", 8)), (("y", Bound("float32")),))


def test_main_begins_with_reading_them():
    code = hoist_uniform_loads(FILL.code)
    body = code[code.index("fn main(") :]
    assert body[body.index("{") :].startswith("{ params = given_params;")
    assert code.count("given_params") == 2
    assert "var<private> params: Params;" in code


def test_lines_keep_their_numbers():
    lines, own = hoist_uniform_loads(FILL.code).splitlines(), FILL.code.splitlines()
    assert len(lines) == len(own)
    assert sum(a != b for a, b in zip(lines, own, strict=True)) == 2


def test_a_shader_without_parameters_is_left_alone():
    code = "@compute @workgroup_size(8)\nfn main() {}\n"
    assert hoist_uniform_loads(code) == code


@pytest.mark.parametrize("at_once", [True, False])
def test_a_device_runs_them_either_way(device, monkeypatch, at_once):
    monkeypatch.setattr(device, "params_at_once", at_once)
    monkeypatch.setattr(device, "_pipelines", {})
    seen = []
    dialect = device.backend.dialect
    monkeypatch.setattr(
        device.backend, "dialect", lambda code, size: seen.append(code) or dialect(code, size)
    )
    y, params = device.buffer(64, "test"), device.buffer(16, "test")
    device.write(params, FILL.pack_params({"units": 3}))
    device.write(y, np.full(16, 7, np.float32))
    windows = {"params": (params, 0, 16), "y": (y, 0, 64)}
    device.dispatch(device.pipeline(FILL), device.bind_group(FILL, windows), (1, 1, 1))
    filled = np.frombuffer(device.read(y, 64), np.float32)
    assert ("given_params" in seen[0]) == at_once
    assert list(filled == 0) == [True] * 12 + [False] * 4


def test_a_compiler_that_proves_uniformity_gets_no_copies(monkeypatch):
    assert Dawn.proves_uniformity
    for proves in (False, True):
        monkeypatch.setattr(WgpuNative, "proves_uniformity", proves)
        device = Device(backend="wgpu")
        assert device.params_at_once == (device.is_cpu and not proves)
