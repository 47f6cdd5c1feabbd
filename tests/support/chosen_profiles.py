"""The profile that a device of some kind would choose; no such device is there."""

from types import SimpleNamespace

from qlora_wgpu.gpu import probe
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.gpu.probe import MatrixUnits


def opened(monkeypatch, *, is_cpu, name="card"):
    """A device's profile and notes; its probes would find everything."""
    units = MatrixUnits(MatrixShape(16, 16, 16, 32))
    monkeypatch.setattr(probe, "matrix_units", lambda device: units)
    monkeypatch.setattr(probe, "subgroup_size", lambda device: 8)
    info = {"device": name, "description": "driver", "adapter_type": "CPU" if is_cpu else "GPU"}
    own = Device.__new__(Device)
    own.gpu, own.backend = SimpleNamespace(info=info), SimpleNamespace(name="dawn")
    own.raw = SimpleNamespace(limits={"max-storage-textures-per-shader-stage": 8})
    own.limits, own.notes, own._broadcasting = Limits(1024, 49_152), (), 0
    return own._choose_profile(), own.notes
