"""All that a process takes of the host's memory, its files' pages left out: planned beforehand.

What was there before is asked of the system; what comes is planned. Three figures are of a driver,
measured: they are those of Mesa's lavapipe, which compiles for the processor, and more than a
card's driver needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from qlora_wgpu.gpu.device import UPLOAD_CHUNK
from qlora_wgpu.gpu.memory import process_bytes
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.lora.peft_names import TOKENS, WHOLE, tensor_name
from qlora_wgpu.model.model_plan import ModelLayout

_PROCESS = 128 * MIB  # where the system does not tell: interpreter, libraries, driver
_COMPILED = 165  # bytes that the driver keeps for each character of a shader
_UPLOADS = UPLOAD_CHUNK  # what the driver keeps of uploads once weights are there
_WORK = 48 * MIB  # traces, recorded work, queues, rows that are encoded
_READING = 3  # copies of an adapter: as its file has it, as the device takes it, what does nothing


def host_memory(
    layout: ModelLayout, waiting: Counter[str], plans: Sequence[Plan], *, trains: bool
) -> Counter[str]:
    """Bytes of host memory by kind at the peak; weights that files are read for are not among them.

    Args:
        layout: What is about to be loaded.
        waiting: Bytes of what waits in host memory.
        plans: All that will be computed.
        trains: Whether an adapter is trained, and saved.
    """
    codes = {launch.shader.label: launch.shader.code for plan in plans for launch in plan.launches}
    taken = process_bytes()
    memory = Counter(
        process=_PROCESS if taken is None else taken,
        kernels=_COMPILED * sum(map(len, codes.values())),
        adapter=_of_training(layout.adapter) if trains else _of_reading(layout.adapter),
        uploads=min(_UPLOADS, sum(storage.nbytes for storage in _weights(plans))),
        work=_WORK,
    )
    # Weights are read before anything is compiled.
    memory["loading"] = max(layout.placement.loading_bytes - memory["kernels"] - memory["work"], 0)
    return +(memory + waiting)


def _of_reading(adapter: Adapter) -> int:
    return _READING * adapter.parameters.nbytes


def _of_training(adapter: Adapter) -> int:
    """The most of an adapter and its moments that is in host memory at a time.

    All of them before a resumed run's go to the device; two adapters where an ended run's is
    written. One more was measured of some runs. What began as a part of the base stays, and is
    written with as much beside it; else what does nothing stays, of which only the base's own rows
    are more than untouched zeros.
    """
    one = adapter.parameters.nbytes
    if adapter.config.changes_base:
        return 2 * one + max(one + adapter.moments.nbytes, 3 * one)
    names = [tensor_name(module, TOKENS) for module in adapter.trained_rows]
    names += [tensor_name(module, WHOLE) for module in adapter.trained_whole]
    own = sum(4 * adapter.placed(name).size for name in names)
    return own + one + max(one + adapter.moments.nbytes, 2 * one)


def _weights(plans: Sequence[Plan]) -> Iterator[Storage]:
    """What is uploaded before anything runs."""
    every = dict.fromkeys(storage for plan in plans for storage in plan.storages)
    return (each for each in every if each.kind == "base" and each.section is None)
