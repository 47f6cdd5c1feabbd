"""Host memory of what waits there: told, and required, before a weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import available_bytes, process_bytes
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.runs.host_memory import host_memory
from qlora_wgpu.supervision.processes import container_limit
from qlora_wgpu.training import Observer


def require_host_room(
    layout: ModelLayout,
    waiting: Counter[str],
    device: Device,
    on_device: int,
    observer: Observer,
    plans: Sequence[Plan],
    *,
    trains: bool,
) -> None:
    """Tells what is planned of host memory, and ends where there is not so much.

    Where nothing is trained it is told only of what waits there.

    Args:
        layout: What is about to be loaded.
        waiting: Bytes of host memory by kind.
        device: A software GPU's memory is the host's, too.
        on_device: Bytes that are planned on it.
        observer: Who is told.
        plans: All that will be computed.
        trains: Whether an adapter is trained.

    Raises:
        OutOfMemoryError: If there is too little; says by how much.
    """
    memory = host_memory(layout, waiting, plans, trains=trains)
    if trains or waiting or layout.placement.mapped_bytes:
        observer.planned_on_host(memory, layout.placement.mapped_bytes)
    needed = sum(memory.values()) - memory["process"]  # which is there
    shared = on_device if device.is_cpu else 0
    free = _free_bytes()
    if free is None or needed + shared <= free:
        return
    most = f", of which {shared / MIB:,.0f} MiB are {device.name}'s" if shared else ""
    raise OutOfMemoryError(
        f"this takes about {(needed + shared) / MIB:,.0f} MiB of host memory{most}, and "
        f"{free / MIB:,.0f} MiB are free, {(needed + shared - free) / MIB:,.0f} MiB too few: "
        f"{_remedy(layout, waiting)}"
    )


def _free_bytes() -> int | None:
    """Host memory that can be had, also where a limit is of this process's own control group."""
    limit, taken = container_limit(), process_bytes()
    left = None if limit is None or taken is None else max(limit - taken, 0)
    return min((size for size in (available_bytes(), left) if size is not None), default=None)


def _remedy(layout: ModelLayout, waiting: Counter[str]) -> str:
    """What to change."""
    if waiting["streamed weights"] and not layout.keep:
        return "set model.cache to true, so that layers wait on disk, or end other programs"
    if layout.placement.problem:
        return layout.placement.problem
    if waiting:
        return "raise device.memory, lower data.max_seq_length or lora.r, or end other programs"
    return "lower data.max_seq_length or lora.r, or end other programs"
