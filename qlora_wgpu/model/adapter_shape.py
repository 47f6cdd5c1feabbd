"""What adapters of one shape share on a device: their vectors, and the programs over them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.adapter_state import neutral_parameters
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.programs import LogitsPrograms, Programs
from qlora_wgpu.ops.batch import make_batch_buffers


class AdapterShape:
    """A base whose weights are on a device, laid out with adapters of one shape.

    One of them is on the device at a time. The weights and the memory of intermediates belong to
    all shapes of a model together.

    Attributes:
        layout: The base with such an adapter.
        programs: What was traced with it.
        neutral: A flat adapter that does nothing.
    """

    def __init__(self, layout: ModelLayout, programs: Programs, device: Device) -> None:
        """Leaves ``neutral`` on the device where that has to be computed.

        Args:
            layout: The base with such an adapter, loaded.
            programs: Those of the layout.
            device: Where they run.
        """
        self.layout = layout
        self.programs = programs
        self.neutral = neutral_parameters(layout, programs, device)
        self._logits: dict[tuple[int, int], LogitsPrograms] = {}

    @property
    def adapter(self) -> Adapter:
        """The layout of the parameters."""
        return self.layout.adapter

    def logits(self, batch: int, seq: int) -> LogitsPrograms:
        """The programs of batches of this shape, made the first time."""
        if (batch, seq) not in self._logits:
            self._logits[batch, seq] = self.programs.logits(make_batch_buffers(batch, seq))
        return self._logits[batch, seq]

    def beside(self, layout: ModelLayout, device: Device) -> AdapterShape:
        """Another shape of the same base."""
        return AdapterShape(layout, Programs(layout, device, self.programs), device)

    def is_of(self, adapter: Adapter) -> bool:
        """Whether an adapter has this shape."""
        own: npt.NDArray[Any] | tuple[Any, ...] = self.adapter.shape
        return own == adapter.shape
