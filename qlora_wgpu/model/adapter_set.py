"""Several adapters on one base: one is on the device, the others are in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qlora_wgpu.checkpoint.tokenizer_files import tokenizer_folder
from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import buffer_bytes
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.compatibility import refuse_other_base
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import split_biases
from qlora_wgpu.model.adapter_model import DEFAULT, FloatArray
from qlora_wgpu.model.adapter_state import (
    AdapterBiases,
    config_of,
    neutral_parameters,
    read_flat,
    warn_if_trained_otherwise,
    write_flat,
)
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.programs import LogitsPrograms, Programs
from qlora_wgpu.ops.batch import make_batch_buffers


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter of an open model.

    Attributes:
        name: What it is called.
        path: The folder that it was read from, if any.
        config: Rank, scaling and targets.
        host_bytes: Host memory that it takes while another one is active.
        device_bytes: Memory of the device that adapters of its shape take together; programs for
            them come beside it when they compute something.
    """

    name: str
    path: str | None
    config: LoraConfig
    host_bytes: int
    device_bytes: int


class AdapterSignature:
    """What adapters of one shape share on a model: the plan, its programs, the neutral adapter.

    The weights and the memory of intermediates are shared by all shapes.
    """

    def __init__(self, programs: Programs) -> None:
        """Leaves ``neutral`` on the device where that has to be computed."""
        self.programs = programs
        self.neutral = neutral_parameters(programs)  # a flat one that does nothing
        self._logits: dict[tuple[int, int], LogitsPrograms] = {}

    @property
    def adapter(self) -> AdapterLayout:
        """The layout of the parameters."""
        return self.programs.plan.adapter

    def logits(self, batch: int, seq: int) -> LogitsPrograms:
        """The programs for batches of this shape, made on the first call."""
        if (batch, seq) not in self._logits:
            self._logits[batch, seq] = self.programs.logits(make_batch_buffers(batch, seq))
        return self._logits[batch, seq]


@dataclass
class HeldAdapter:
    """An adapter of a model, on the device or not."""

    signature: AdapterSignature  # shared with adapters of the same shape
    path: str | None  # the folder that it was read from
    prompt_folder: Path  # which says how its prompts are written
    flat: FloatArray | None = None  # its parameters; None while only the device has them
    biases: Mapping[str, FloatArray] = field(default_factory=dict)  # by layers


class AdapterSet:
    """A model's adapters by their names, in the order in which they came."""

    def __init__(self, held: HeldAdapter, device: Device, biases: AdapterBiases) -> None:
        """Starts with the one that the model was opened with, which is on the device."""
        self._device = device
        self._biases = biases
        self._held = {DEFAULT: held}
        self.active_name = DEFAULT

    @property
    def active(self) -> HeldAdapter:
        """The one that computes."""
        return self._held[self.active_name]

    def told(self) -> dict[str, LoadedAdapter]:
        """All of them, for users."""
        told = {}
        for name, held in self._held.items():
            adapter = held.signature.adapter
            nbytes = 4 * adapter.length + sum(array.nbytes for array in held.biases.values())
            on_device = sum(buffer_bytes(each.nbytes) for each in adapter.parameters.storages)
            told[name] = LoadedAdapter(name, held.path, adapter.config, nbytes, on_device)
        return told

    def named(self, name: str) -> HeldAdapter:
        """The adapter of this name; a ``ConfigError`` if there is none."""
        if name not in self._held:
            raise ConfigError(f"there is no adapter {name!r}, but {', '.join(self._held)}")
        return self._held[name]

    def require_new(self, name: object) -> None:
        """Refuses a name that another adapter has, or that is none."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name must be a text, got {name!r}")
        if name in self._held:
            raise ConfigError(
                f"there is an adapter {name!r} already: delete_adapter({name!r}) first, or choose "
                "another name"
            )

    def read(self, folder: str | PathLike[str], name: str) -> None:
        """Puts an adapter of a file beside the others; errors as for ``load_adapter``."""
        plan = self.active.signature.programs.plan
        base = plan.pretrained
        of = base.architecture
        if plan.adapter.start is not None:
            raise ConfigError(
                f"{folder}: the base of this model is without the part that its own adapter began "
                f"as ({plan.adapter.config.init_lora_weights}), and takes no other adapter: "
                "open the base once more for it, or that one first and this one beside it"
            )
        tensors, stored = load_adapter(Path(folder), biases=True, stacking=of.stacking)
        plan = plan.with_adapter(config_of(stored, tensors, of))
        pairs, biases = split_biases(tensors)
        shapes = plan.adapter.shapes
        refuse_other_base(folder, stored, pairs, shapes, base.name_or_path)
        warn_if_trained_otherwise(folder, plan.quant)
        if plan.quant.scheme != "none" and started_in(folder, pairs, stored):
            warnings.warn(
                f"{folder} was trained on a base without the part that it began as, quantized; "
                "beside other adapters it stands on the whole one, quantized, and computes nearly "
                "the same",
                stacklevel=3,
            )
        flat = plan.adapter.join(pairs)
        self._biases.check(biases)
        assert base.folder is not None
        prompts = tokenizer_folder(folder) or base.folder.text_folder
        signature = self._signature_of(plan)
        self._held[name] = HeldAdapter(signature, str(folder), prompts, flat, biases)

    def activate(self, name: str, *, changed: bool) -> None:
        """Puts an adapter on the device; if the active one was ``changed`` there, reads it back."""
        chosen, active = self._held[name], self.active
        if active.flat is None or changed:
            active.flat = read_flat(self._device, active.signature.adapter.parameters)
        active.biases = self._biases.taken
        assert chosen.flat is not None
        write_flat(self._device, chosen.signature.adapter.parameters, chosen.flat)
        self._biases.take(chosen.biases)
        self.active_name = name

    def delete(self, name: str) -> None:
        """Frees an adapter, and with the last one of a shape its programs."""
        self.named(name)
        if name == self.active_name:
            raise ConfigError(
                f"the adapter {name!r} is active: set_adapter another one before it is deleted"
            )
        del self._held[name]

    def _signature_of(self, plan: ModelPlan) -> AdapterSignature:
        """That of a layout's adapter, which gets its room on the device at once."""
        own: npt.NDArray[Any] | tuple[Any, ...] = plan.adapter.shape
        for held in self._held.values():
            if held.signature.adapter.shape == own:
                return held.signature
        programs = Programs(plan, self._device, self.active.signature.programs)
        signature = AdapterSignature(programs)
        write_flat(self._device, signature.adapter.parameters, signature.neutral)
        return signature
