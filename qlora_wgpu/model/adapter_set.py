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
    warn_if_quantized_differently,
    write_flat,
)
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.programs import LogitsPrograms, Programs
from qlora_wgpu.ops.batch import make_batch_buffers


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter of an open model.

    Attributes:
        name: Its name.
        path: The folder that it was read from, if any.
        config: Rank, scaling and targets.
        host_bytes: Host memory that it takes while another one is active.
        device_bytes: Device memory that adapters of its shape take together, in addition to their
        programs.
    """

    name: str
    path: str | None
    config: LoraConfig
    host_bytes: int
    device_bytes: int


class AdapterSignature:
    """What adapters of one shape share on a model: the plan, its programs, the neutral adapter.

    All shapes share the weights and the memory of intermediates.
    """

    def __init__(self, programs: Programs) -> None:
        """Leaves ``neutral`` on the device if it had to be computed."""
        self.programs = programs
        self.neutral = neutral_parameters(programs)  # a flat adapter that changes nothing
        self._logits: dict[tuple[int, int, int], LogitsPrograms] = {}

    @property
    def adapter(self) -> AdapterLayout:
        return self.programs.plan.adapter

    def logits(self, batch: int, seq: int, *, image_rows: int = 0) -> LogitsPrograms:
        """The programs for batches of this shape, made on the first call."""
        key = batch, seq, image_rows
        if key not in self._logits:
            images = self.programs.plan.pretrained.architecture.images if image_rows else None
            buffers = make_batch_buffers(batch, seq, images=images, image_rows=image_rows)
            self._logits[key] = self.programs.logits(buffers)
        return self._logits[key]


@dataclass
class HeldAdapter:
    """An adapter of a model, on the device or not."""

    signature: AdapterSignature  # shared with adapters of the same shape
    path: str | None  # the folder that it was read from, if any
    prompt_folder: Path  # the folder with its prompt format
    flat: FloatArray | None = None  # its parameters; None while only the device has them
    biases: Mapping[str, FloatArray] = field(default_factory=dict)  # by layers


class AdapterSet:
    """A model's adapters by name, in the order in which they were added."""

    def __init__(self, held: HeldAdapter, device: Device, biases: AdapterBiases) -> None:
        self._device = device
        self._biases = biases
        self._held = {DEFAULT: held}
        self.active_name = DEFAULT

    @property
    def active(self) -> HeldAdapter:
        return self._held[self.active_name]

    def loaded(self) -> dict[str, LoadedAdapter]:
        loaded = {}
        for name, held in self._held.items():
            adapter = held.signature.adapter
            nbytes = 4 * adapter.length + sum(array.nbytes for array in held.biases.values())
            on_device = sum(buffer_bytes(each.nbytes) for each in adapter.parameters.storages)
            loaded[name] = LoadedAdapter(name, held.path, adapter.config, nbytes, on_device)
        return loaded

    def named(self, name: str) -> HeldAdapter:
        if name not in self._held:
            raise ConfigError(f"unknown adapter {name!r} (loaded: {', '.join(self._held)})")
        return self._held[name]

    def require_new(self, name: object) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name must be a non-empty string, got {name!r}")
        if name in self._held:
            raise ConfigError(
                f"an adapter {name!r} already exists: call delete_adapter({name!r}) first, or "
                "choose another name"
            )

    def read(self, folder: str | PathLike[str], name: str) -> None:
        """Adds an adapter from a file; errors as for ``load_adapter``."""
        plan = self.active.signature.programs.plan
        base = plan.pretrained
        of = base.architecture
        if plan.adapter.start is not None:
            raise ConfigError(
                f"{folder}: this model's base lacks the part that its own adapter started as "
                f"({plan.adapter.config.init_lora_weights}), so no other adapter can be added: "
                "open the base again for it, or open this one first and add the other"
            )
        tensors, stored = load_adapter(Path(folder), biases=True, stacking=of.stacking)
        plan = plan.with_adapter(config_of(stored, tensors, of))
        pairs, biases = split_biases(tensors)
        shapes = plan.adapter.shapes
        refuse_other_base(folder, stored, pairs, shapes, base.name_or_path)
        warn_if_quantized_differently(folder, plan.quant)
        if plan.quant.scheme != "none" and started_in(folder, pairs, stored):
            warnings.warn(
                f"{folder} was trained on a quantized base without the part that it started as; "
                "together with other adapters it uses the whole quantized base, with nearly the "
                "same results",
                stacklevel=3,
            )
        flat = plan.adapter.join(pairs)
        self._biases.check(biases)
        assert base.folder is not None
        prompts = tokenizer_folder(folder) or base.folder.text_folder
        signature = self._signature_of(plan)
        self._held[name] = HeldAdapter(signature, str(folder), prompts, flat, biases)

    def activate(self, name: str, *, changed: bool) -> None:
        """Uploads an adapter; reads the active one back first if it was ``changed``."""
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
                f"the adapter {name!r} is active: call set_adapter with another one before "
                "deleting it"
            )
        del self._held[name]

    def _signature_of(self, plan: ModelPlan) -> AdapterSignature:
        own: npt.NDArray[Any] | tuple[Any, ...] = plan.adapter.shape
        for held in self._held.values():
            if held.signature.adapter.shape == own:
                return held.signature
        programs = Programs(plan, self._device, self.active.signature.programs)
        signature = AdapterSignature(programs)
        write_flat(self._device, signature.adapter.parameters, signature.neutral)
        return signature
