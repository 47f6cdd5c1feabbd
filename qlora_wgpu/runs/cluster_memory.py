"""What a run takes of the devices of a cluster: of each worker's, and of the owner's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qlora_wgpu.cluster.gradient_sum import received_gradient
from qlora_wgpu.config import Config
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import room
from qlora_wgpu.gpu.timing import READ_AHEAD
from qlora_wgpu.graph.plan import make_plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.flat_vector import AdapterForms
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.ops.tensor import add_to
from qlora_wgpu.runs.soundness import update_plan


@dataclass(frozen=True)
class ClusterMemory:
    """Bytes that a run takes of a cluster's devices.

    Attributes:
        worker: Of each worker's, while it computes the longest step.
        owner: Of the owner's.
    """

    worker: int
    owner: int

    @classmethod
    def of(cls, settings: Config, layout: ModelLayout, options: StepOptions) -> ClusterMemory:
        """That of a run whose longest step has these options."""
        worker = layout.with_forms(forms_of_worker(settings))
        step = worker.memory(options, worker.sized(options).plan)
        return cls(sum(step.values()), sum(owner_memory(settings, layout).values()))


def forms_of_worker(settings: Config) -> AdapterForms:
    """A worker gives micro-batches' own gradients, in float32, and never updates."""
    return AdapterForms(settings.optim.name, updates=False)


def owner_memory(settings: Config, layout: ModelLayout) -> Counter[str]:
    """Bytes on the owner's device by kind: no base, no activations, and a gradient that has come.

    Args:
        settings: The run's.
        layout: The model's.
    """
    layout = layout.with_forms(layout.adapter.forms)
    layout.make_room_for_counts()  # of workers whose kernels have such a type
    graph = layout.new_graph()
    add_to(graph, layout.adapter.gradient, received_gradient(layout.adapter))
    memory = reading_memory([make_plan(graph), update_plan(settings, layout)])
    assert layout.stats.storage is not None
    memory["inputs"] += READ_AHEAD * layout.stats.storage.nbytes  # copies for the log
    return memory


def require_owner_room(memory: Counter[str], device: Device) -> None:
    """Sees that the owner's device has room, before workers are asked for.

    Raises:
        OutOfMemoryError: If it has not; says by how much.
    """
    budget = device.budget if device.budget is not None else room(device)
    needed = sum(memory.values())
    if budget is not None and needed > budget:
        raise OutOfMemoryError(
            f"the owner of this run, which has the adapter, its gradients and its moments, takes "
            f"{needed / MIB:,.1f} MiB of device memory, {(needed - budget) / MIB:,.1f} MiB more "
            f"than the {budget / MIB:,.1f} MiB there are: lower lora.r, set optim.name to "
            "adamw_8bit, or raise device.memory"
        )
