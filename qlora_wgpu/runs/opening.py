"""A base model opened once for a whole run, and brought onto a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.targets import lora_config
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import TrainingOptions
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel, device_layout
from qlora_wgpu.training import Observer


@dataclass(frozen=True)
class OpenedModel:
    """A base model's folder, config.json's meaning and tokenizer, each read once.

    Attributes:
        pretrained: The folder and what config.json says.
        path: The folder.
    """

    pretrained: Pretrained
    path: Path

    @classmethod
    def open(cls, path: str) -> OpenedModel:
        """Opens a folder or a model of the hub.

        Raises:
            CheckpointError: If there is no such model, or a file of it is missing or damaged.
            UnsupportedModelError: If it asks for something that is not computed here.
        """
        pretrained = Pretrained.open(path)
        assert pretrained.folder is not None
        return cls(pretrained, pretrained.folder.path)

    @property
    def architecture(self) -> Architecture:
        """The model's architecture, as config.json describes it."""
        return self.pretrained.architecture

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read the first time that it is asked for.

        Raises:
            TokenizerError: If the folder has none, or it is damaged.
        """
        return Tokenizer.from_folder(self.path)


def open_device(settings: DeviceConfig, observer: Observer) -> Device:
    """Opens the GPU of a configuration.

    Raises:
        DeviceError: If there is none.
    """
    observer.activity("opening the device")
    device = Device(settings.gpu, settings.backend)
    observer.activity("")
    return device


def load_model(
    layout: ModelLayout,
    device: Device,
    observer: Observer,
    *,
    seed: int = 0,
    options: TrainingOptions | None = None,
) -> QLoRAModel:
    """Loads a layout's weights, telling the observer of each tensor.

    Raises:
        CheckpointError: If a tensor is missing, damaged or of another shape.
        OutOfMemoryError: If the device has no room.
    """
    total, done = layout.num_tensors, 0

    def progress(name: str) -> None:
        nonlocal done
        observer.loading(name, done, total)
        done += 1

    model = QLoRAModel(layout, device, seed=seed, options=options, progress=progress)
    observer.loading("", total, total)
    return model


def load_adapted(
    source: OpenedModel,
    adapter: str | None,
    quant: QuantConfig,
    compute_dtype: str,
    device: Device,
    observer: Observer,
) -> QLoRAModel:
    """A model with an adapter, or with one that does nothing.

    Args:
        source: The base.
        adapter: Folder of a PEFT adapter, or None.
        quant: How the base's linear layers are stored.
        compute_dtype: Element type of matmul operands.
        device: The device that gets it.
        observer: Who is told how far the weights are.

    Raises:
        CheckpointError: If the adapter or the weights are damaged or do not fit.
    """
    lora = LoraConfig(r=1, lora_alpha=1)
    tensors = None
    if adapter is not None:
        tensors, stored = load_adapter(adapter)
        lora = lora_config(stored)
    layout = device_layout(source.pretrained, lora, quant, compute_dtype, device)
    model = load_model(layout, device, observer)
    if tensors is not None:
        model.load_adapter(tensors)
    return model
