"""Several adapters on one base: one is on the device, the others wait in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.tokenizer_files import tokenizer_folder
from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import buffer_bytes
from qlora_wgpu.graph.sharded_vector import Pieces
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.compatibility import refuse_other_base
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.lora.peft_names import split_biases
from qlora_wgpu.model.adapter_model import DEFAULT, AdapterShape, FloatArray, Progress
from qlora_wgpu.model.adapter_state import (
    config_of,
    read_flat,
    warn_if_trained_otherwise,
    write_flat,
)
from qlora_wgpu.model.loaded_model import LoadedModel
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.steps import TrainingOptions


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


@dataclass
class _Held:
    """What is kept of an adapter.

    Attributes:
        shape: What it shares with others.
        path: The folder that it was read from.
        prompt_folder: The folder that says how its prompts are written.
        flat: Its parameters; None while only the device has them.
        biases: The biases that belong to it, by their layers.
    """

    shape: AdapterShape
    path: str | None
    prompt_folder: Path
    flat: FloatArray | None = None
    biases: Mapping[str, FloatArray] = field(default_factory=dict)


class SeveralAdapters(LoadedModel):
    """A base on a device with any number of adapters by their names, one of which is active.

    Attributes:
        active_adapter: The name of the one that computes; others wait in host memory.
    """

    def __init__(
        self,
        layout: ModelLayout,
        device: Device,
        *,
        seed: int = 0,
        options: TrainingOptions | None = None,
        progress: Progress = lambda name: None,
    ) -> None:
        """Arguments and errors as for ``LoadedModel``."""
        super().__init__(layout, device, seed=seed, options=options, progress=progress)
        self._held = {DEFAULT: _Held(self._shape, None, self.prompt_folder)}
        self._is_off = False

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """All adapters by their names, in the order in which they came."""
        return {name: self._told(name) for name in self._held}

    def load_adapter(
        self,
        adapter: str | PathLike[str] | Mapping[str, FloatArray],
        name: str | None = None,
    ) -> None:
        """Replaces the active adapter, or with a name, puts another one beside those there are.

        One with a name may have another rank, other targets and biases; the base is not read
        again. It waits until ``set_adapter`` names it. Warns where the run of a folder quantized
        the base otherwise than this model does.

        Args:
            adapter: Folder of a PEFT adapter, or without a name, its tensors by PEFT's names.
            name: What it shall be called.

        Raises:
            CheckpointError: If it is damaged or does not fit this model; without a name, also if
                it does not fit the active adapter's LoraConfig.
            ConfigError: If there is one of that name already, or tensors are given a name.
            OutOfMemoryError: If the device has no room for the first of its shape.
        """
        if name is None:
            super().load_adapter(adapter)
            if not isinstance(adapter, Mapping):
                self.name_folder(adapter)
            return
        if isinstance(adapter, Mapping):
            raise ConfigError(
                f"adapter {name!r}: only a folder, which says rank and targets, can be loaded "
                "under a name"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name must be a text, got {name!r}")
        if name in self._held:
            raise ConfigError(
                f"there is an adapter {name!r} already: delete_adapter({name!r}) first, or choose "
                "another name"
            )
        with self.device.in_turn:
            self._require_on("load_adapter")
            self._held[name] = self._read(adapter)

    def name_folder(self, path: str | PathLike[str]) -> None:
        """Tells which folder the active adapter, of which tensors were given, was read from."""
        self._held[self.active_adapter].path = str(path)
        self.prompt_folder = tokenizer_folder(path) or self.folder.text_folder

    def set_adapter(self, name: str) -> None:
        """Makes another adapter the active one; waits for the device if that was trained.

        Raises:
            ConfigError: If there is none of that name, or the adapter is off.
        """
        with self.device.in_turn:
            self._require_on("set_adapter")
            chosen, active = self._named(name), self._held[self.active_adapter]
            if chosen is active:
                return
            self._keep(active)
            assert chosen.flat is not None
            write_flat(self.device, chosen.shape.adapter.parameters, chosen.flat)
            self.biases.take(chosen.biases)
            self.active_adapter, self.parameters_changed = name, False
            self.prompt_folder = chosen.prompt_folder
            self._shape = chosen.shape
            self.programs = chosen.shape.programs
            self.layout = chosen.shape.layout
            self.adapter, self.network = self.layout.adapter, self.layout.network

    def delete_adapter(self, name: str) -> None:
        """Frees an adapter, and with the last of its shape what was made for that.

        Raises:
            ConfigError: If there is none of that name, or it is active.
        """
        with self.device.in_turn:
            self._named(name)
            if name == self.active_adapter:
                raise ConfigError(
                    f"the adapter {name!r} is active: set_adapter another one before it is deleted"
                )
            del self._held[name]

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """While it is entered, the model is the base alone, with its own biases."""
        with self.device.in_turn, self.biases.off():
            before = self._is_off, self.parameters_changed
            kept = self.read_flat(self.adapter.parameters).copy()
            self.write_parameters(self.neutral)
            self._is_off = True
            try:
                yield
            finally:
                self.write_parameters(kept)
                self._is_off, self.parameters_changed = before

    adapter_off = disable_adapter

    def _read(self, folder: str | PathLike[str]) -> _Held:
        of = self.architecture
        if self.layout.adapter.start is not None:
            raise ConfigError(
                f"{folder}: the base of this model is without the part that its own adapter began "
                f"as ({self.layout.adapter.config.init_lora_weights}), and takes no other adapter: "
                "open the base once more for it, or that one first and this one beside it"
            )
        tensors, stored = load_adapter(Path(folder), biases=True, stacking=of.stacking)
        layout = self._shape.layout.with_adapter(config_of(stored, tensors, of))
        shapes = layout.adapter.shapes
        pairs = split_biases(tensors)[0]
        refuse_other_base(folder, stored, pairs, shapes, self.name_or_path, routers=of.routers)
        warn_if_trained_otherwise(folder, self.quant)
        if self.quant.scheme != "none" and started_in(folder, split_biases(tensors)[0], stored):
            warnings.warn(
                f"{folder} was trained on a base without the part that it began as, quantized; "
                "beside other adapters it stands on the whole one, quantized, and computes nearly "
                "the same",
                stacklevel=3,
            )
        pairs, biases = split_biases(tensors)
        flat = layout.adapter.join(pairs)
        self.biases.check(biases)
        prompts = tokenizer_folder(folder) or self.folder.text_folder
        return _Held(self._shape_of(layout), str(folder), prompts, flat, biases)

    def _shape_of(self, layout: ModelLayout) -> AdapterShape:
        """The shape that a layout's adapter has, which gets its room on the device at once."""
        shapes = (held.shape for held in self._held.values())
        shape = next((each for each in shapes if each.is_of(layout.adapter)), None)
        if shape is None:
            shape = self._shape.beside(layout, self.device)
            write_flat(self.device, shape.adapter.parameters, shape.neutral)
        return shape

    def _keep(self, active: _Held) -> None:
        """Brings home what the device alone has."""
        if active.flat is None or self.parameters_changed:
            active.flat = read_flat(self.device, active.shape.adapter.parameters)
        active.biases = self.biases.taken
        active.prompt_folder = self.prompt_folder

    def _named(self, name: str) -> _Held:
        if name not in self._held:
            raise ConfigError(f"there is no adapter {name!r}, but {', '.join(self._held)}")
        return self._held[name]

    def _require_on(self, what: str) -> None:
        if self._is_off:
            raise ConfigError(f"{what} within disable_adapter: leave that first")

    def _told(self, name: str) -> LoadedAdapter:
        held = self._held[name]
        adapter = held.shape.adapter
        beside = sum(array.nbytes for array in held.biases.values())
        return LoadedAdapter(
            name,
            held.path,
            adapter.config,
            4 * adapter.length + beside,
            _device_bytes(adapter.parameters),
        )


def _device_bytes(vectors: Pieces) -> int:
    storages: list[Any] = [piece.storage for piece in vectors.pieces]
    return sum(buffer_bytes(storage.nbytes) for storage in storages)
