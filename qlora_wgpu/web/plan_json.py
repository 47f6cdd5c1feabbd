"""Plans as a page replays them: launches by numbers of shaders, buffers and slots.

A launch is ``[shader, [x, y, z], windows, parameters, microseconds]``. A window is ``[binding,
memory, first byte, bytes]``, where a memory that is not negative is a buffer, and -1 - n the n-th
slot. Parameters are the words of its uniform. The time is a slow GPU's, guessed as ``gpu.pace``
does: a page sizes its first submits by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from qlora_wgpu.gpu.cost_model import Pace
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.preprocessor import without_comments
from qlora_wgpu.gpu.wgsl import Shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.submission import boxes, parts_needed
from qlora_wgpu.graph.tensor import Tensor

# Windows ends work after two seconds; a launch takes a quarter of that where GPUs are slow.
_LONGEST = 0.5
_SLOW = Pace.of_kind("IntegratedGPU", _LONGEST)


class Shaders:
    """The shaders of a site's plans, each once.

    Attributes:
        most_bound: The most storage buffers that one of them is bound to.
    """

    def __init__(self) -> None:
        """Starts without any."""
        self._numbers: dict[str, int] = {}
        self._shaders: list[Shader] = []
        self.most_bound = 0

    def number(self, launch: Launch) -> int:
        """The place of a launch's shader among them; it is added the first time."""
        shader = launch.shader
        if shader.label not in self._numbers:
            self._numbers[shader.label] = len(self._shaders)
            self._shaders.append(shader)
            self.most_bound = max(self.most_bound, len(launch.tensors))
        return self._numbers[shader.label]

    @property
    def most_invocations(self) -> int:
        """The most invocations of a workgroup."""
        return max(int(np.prod(shader.workgroup_size)) for shader in self._shaders)

    def as_json(self) -> list[dict[str, str]]:
        """Label and source of each, in order."""
        return [{"label": s.label, "code": _compact(s.code)} for s in self._shaders]


def _compact(code: str) -> str:
    """Without comments and blank lines, which are a third of it."""
    lines = (line.strip() for line in without_comments(code).splitlines())
    return "\n".join(line for line in lines if line)


def plan_json(plan: Plan, shaders: Shaders, device: Device) -> dict[str, Any]:
    """A plan as JSON values; what it needs is allocated on a recording device."""
    for storage in plan.storages:
        allocate(device, storage)
    return {
        "slots": list(plan.slots),
        "launches": [
            [
                shaders.number(part),
                list(part.workgroups),
                [list(window) for window in _windows(plan, part)],
                np.frombuffer(part.params, np.uint32).tolist(),
                round(1e6 * _SLOW.seconds(part.path, part.flops, part.nbytes)),
            ]
            for launch in plan.launches
            for part in _parts(launch)
        ],
    }


def window_json(plan: Plan, tensor: Tensor) -> list[int]:
    """Where a tensor lies: its memory, first byte, bytes."""
    if tensor.storage is not None:
        memory, first = tensor.storage.whole.buffer.number, tensor.storage.first_byte
        return [memory, first + tensor.offset, tensor.nbytes]
    return [-1 - plan.slot_of[tensor], 0, tensor.nbytes]


def _windows(plan: Plan, launch: Launch) -> Iterator[tuple[int, ...]]:
    for name, tensor in launch.tensors.items():
        yield launch.shader.bindings[name].index, *window_json(plan, tensor)


def _parts(launch: Launch) -> list[Launch]:
    """The launch, or parts of its grid where it would take a slow GPU too long by itself."""
    seconds = _SLOW.seconds(launch.path, launch.flops, launch.nbytes)
    count = parts_needed(seconds, _LONGEST) if launch.has_parts else 1
    if count == 1:
        return [launch]
    return [launch.part(*box) for box in boxes(launch.workgroups, count)]
