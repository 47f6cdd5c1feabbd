"""Clusters within this process."""

import pytest
from support.workers_here import WorkersHere


@pytest.fixture
def clusters(monkeypatch, device):
    """Those that runs of the test open, with workers in this process, all on one device."""
    made = []
    monkeypatch.setattr("qlora_wgpu.runs.training.open_device", lambda *given: device)
    monkeypatch.setattr("qlora_wgpu.runs.cluster.device_of", lambda settings: device)

    class Kept(WorkersHere):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr("qlora_wgpu.runs.cluster.Cluster", Kept)
    return made
