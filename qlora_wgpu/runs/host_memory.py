"""All that a process takes of the host's memory, its files' pages left out: planned beforehand.

What was there before is asked of the system; what comes is planned. Three figures are of a driver,
measured: they are those of Mesa's lavapipe, which compiles for the processor, and more than a
card's driver needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from qlora_wgpu.gpu.device import UPLOAD_CHUNK
from qlora_wgpu.gpu.memory_size import process_bytes
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.layout import ModelLayout

_PROCESS = 128 * MIB  # where the system does not tell: interpreter, libraries, driver
_COMPILED = 165  # bytes that the driver keeps for each character of a shader
_UPLOADS = UPLOAD_CHUNK  # what the driver keeps of uploads once weights are there
_WORK = 48 * MIB  # traces, recorded work, queues, rows that are encoded
# Copies: what does nothing and what is begun with, and while a checkpoint is written all of its
# state, once as the device gives it and once as a file has it.
_READING, _TRAINING = 3, 7


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
    copies = _TRAINING if trains else _READING
    taken = process_bytes()
    memory = Counter(
        process=_PROCESS if taken is None else taken,
        kernels=_COMPILED * sum(map(len, codes.values())),
        adapter=copies * layout.adapter.parameters.nbytes,
        uploads=min(_UPLOADS, sum(storage.nbytes for storage in _weights(plans))),
        work=_WORK,
    )
    # Weights are read before anything is compiled.
    memory["loading"] = max(layout.loading_bytes - memory["kernels"] - memory["work"], 0)
    return +(memory + waiting)


def _weights(plans: Sequence[Plan]) -> Iterator[Storage]:
    """What is uploaded before anything runs."""
    every = dict.fromkeys(storage for plan in plans for storage in plan.storages)
    return (each for each in every if each.kind == "base" and each.section is None)
