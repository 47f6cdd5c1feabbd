"""A device on which whole runs only take their memory and move their bytes: nothing is computed."""

import numpy as np
import pytest

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.program import Program


def allocating_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device of all runs from now on; their losses and norms are ones."""
    device = Device()
    monkeypatch.setattr("qlora_wgpu.runs.training.open_device", lambda *given: device)
    monkeypatch.setattr("qlora_wgpu.runs.opening.verified_layout", lambda *given: given[3])
    monkeypatch.setattr("qlora_wgpu.training.references._store", lambda *given: None)  # zeros
    monkeypatch.setattr(Device, "pipeline", lambda *given: None)
    monkeypatch.setattr(Device, "bind_group", lambda *given: None)

    def run(program):
        for step in program._host_steps:
            step.run()
        for storage in program.plan.storages:
            if storage.label == "stats":
                program._device.write(storage.buffer, np.ones(4, np.float32))

    monkeypatch.setattr(Program, "run", run)
    monkeypatch.setattr(Program, "run_preemptible", lambda program: iter([run(program)]))
    monkeypatch.setattr(Program, "begin", lambda program: None)  # each by itself
    monkeypatch.setattr(Program, "read", lambda program, tensor: bytes(tensor.nbytes))
    return device
