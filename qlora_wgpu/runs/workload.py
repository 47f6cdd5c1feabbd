"""A training to be planned, and the GPU for which it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.errors import OutOfMemoryError, QLoRAError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, Profile
from qlora_wgpu.gpu.memory import memory_size
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterForms
from qlora_wgpu.model.budget import Fit, fit
from qlora_wgpu.model.memory_plan import KeepDequantized, has_room, with_kept
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.offload_plan import Residency
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions, TrainingOptions
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.runs.opening import device_of

_LARGEST_BINDING = (1 << 31) - 1  # what most cards allow


@dataclass(frozen=True)
class Workload:
    """The training that is to be planned.

    Attributes:
        pretrained: The base model, of which config.json is known.
        lora: The adapter.
        quant: How the base's linear layers are stored.
        compute_dtype: Type of matmul operands.
        batch: Rows of a micro-batch.
        seq: Tokens of a row.
        checkpointing: Whether layers are recomputed in the backward.
        accumulation: Micro-batches of a step.
        forms: In which types the adapter's gradient and moments are kept.
        objective: The loss that is minimized.
        sides: Rows of a micro-batch for each that the settings count: two of a pair.
    """

    pretrained: Pretrained
    lora: LoraConfig
    quant: QuantConfig
    compute_dtype: str
    batch: int
    seq: int
    checkpointing: bool
    accumulation: int = 1
    forms: AdapterForms = FLOAT32
    objective: Objective = PLAIN
    sides: int = 1

    @property
    def options(self) -> StepOptions:
        """Its longest step."""
        return TrainingOptions(self.checkpointing, self.objective).train(self.batch, self.seq)


@dataclass(frozen=True)
class Target:
    """For what it is planned: an open GPU, or a common one where none is there.

    Attributes:
        name: The GPU's name.
        max_binding: Bytes of its largest binding.
        profile: How kernels are cut for it.
        nbytes: Bytes of its memory, where they are known.
        is_host: Whether that is the host's.
    """

    name: str = "a GPU"
    max_binding: int = _LARGEST_BINDING
    profile: Profile = GPU_PROFILE
    nbytes: int | None = None
    is_host: bool = False

    @classmethod
    def here(cls, settings: DeviceConfig | None = None) -> Target:
        """The GPU that a run would take here; a common one where there is none."""
        try:
            return cls.of(device_of(settings or DeviceConfig()))
        except QLoRAError:
            return cls()

    @classmethod
    def of(cls, device: Device) -> Target:
        """An open GPU."""
        nbytes = memory_size(device)
        return cls(device.name, device.max_binding, device.profile, nbytes, device.is_cpu)

    def layout(self, workload: Workload) -> ModelLayout:
        """The model laid out for it."""
        return ModelLayout(
            workload.pretrained,
            workload.lora,
            workload.quant,
            workload.compute_dtype,
            profile=self.profile,
            max_binding=self.max_binding,
            forms=workload.forms,
        )

    def memory(self, workload: Workload) -> Counter[str]:
        """Bytes on the device by kind."""
        return self.layout(workload).memory(workload.options)

    def total(self, workload: Workload) -> int | None:
        """All bytes; None where there is more than kernels can count."""
        return self.layout(workload).total(workload.options)

    def totals(self, workload: Workload, *, kept: bool = False) -> Totals:
        """``total`` of a workload in other sizes; with weights kept dequantized, if they are."""
        return Totals(with_kept(self.layout(workload), kept=kept), workload)

    def as_kept(
        self,
        layout: ModelLayout,
        options: StepOptions,
        asked: KeepDequantized,
        budget: int | None,
    ) -> ModelLayout:
        """A layout with weights kept dequantized, where training with these options keeps them.

        Args:
            layout: Without them, where they are not ``asked`` for in any case.
            options: Of the longest step.
            asked: ``device.keep_dequantized``.
            budget: Bytes that training may take, if somebody says how many.
        """
        if asked != "auto" or (budget is None and not self.is_host):
            return layout
        kept = with_kept(layout)
        total = kept.total(options)
        fits = total is not None and (budget is None or total <= budget)
        return kept if fits and (not self.is_host or has_room(total or 0)) else layout


class Totals:
    """All bytes of a training in several sizes, each planned once.

    Attributes:
        layout: The model.
    """

    def __init__(self, layout: ModelLayout, workload: Workload) -> None:
        """Plans nothing yet.

        Args:
            layout: The model.
            workload: The training; what is not said of a size is as here.
        """
        self.layout = layout
        self._workload = workload
        self._known: dict[StepOptions, int | None] = {}

    def __call__(self, **sizes: Any) -> int | None:
        """Bytes with this ``batch``, ``seq`` or ``checkpointing``; None if beyond counting."""
        options = self.options(**sizes)
        if options not in self._known:
            self._known[options] = self.layout.total(options)
        return self._known[options]

    def options(self, **sizes: Any) -> StepOptions:
        """A step's in these sizes."""
        return replace(self._workload, **sizes).options

    def waiting(self, residency: Residency) -> Totals:
        """The same with what waits in host memory."""
        return Totals(self.layout.waiting(residency), self._workload)


def fitted_within(layout: ModelLayout, workload: Workload, budget: int) -> Fit | None:
    """How training keeps a budget; None where it cannot."""
    try:
        return fit(layout, workload.options, budget, accumulation=workload.accumulation)
    except OutOfMemoryError:
        return None
