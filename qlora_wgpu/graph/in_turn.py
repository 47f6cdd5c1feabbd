"""Programs that run one after the other, in few submits."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.program import Program
from qlora_wgpu.graph.submits import growing, recorded


def run_in_turn(device: Device, programs: Sequence[Program]) -> None:
    """Runs programs as ``run`` of each would, in their order; does not wait but in first runs.

    A submit takes the host as long as some hundred dispatches. So the first one is of no more than
    ``dispatches_per_submit``, and the driver begins; each further one is of twice as many, which
    are encoded while it computes. Programs that are cut by time, or within which the host has
    something to do, are run by themselves.

    Args:
        device: Where all of them run.
        programs: The programs; any may be there several times.

    Raises:
        DeviceError: If the driver refuses something, or the GPU was lost.
    """
    with device.in_turn:
        waiting: list[Dispatch] = []
        for program in programs:
            dispatches = program.begin()
            if dispatches is None:
                _submit(device, waiting)
                waiting = []
                program.run()
            else:
                waiting += dispatches
        _submit(device, waiting)


def _submit(device: Device, dispatches: Sequence[Dispatch]) -> None:
    for each in growing(dispatches, device.dispatches_per_submit):
        device.submit(recorded(device, each))
