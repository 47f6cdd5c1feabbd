"""A base model opened once for a whole run, and brought onto a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qlora_wgpu.config import Config, LoraConfig, ModelConfig
from qlora_wgpu.config.as_trained import Changes, as_trained, changed, find_run
from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.new_tokens import extended_tokenizer
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.compatibility import refuse_other_base
from qlora_wgpu.model.adapter_state import as_begun, config_of
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.presence import is_dir
from qlora_wgpu.runs.faster_backend import faster_through_dawn
from qlora_wgpu.runs.reading import Reading, Texts, read_within_room
from qlora_wgpu.selfcheck import avoid_what_is_wrong
from qlora_wgpu.training import Observer


@dataclass(frozen=True)
class OpenedModel:
    """A base model's folder, config.json's meaning and tokenizer, each read once.

    Attributes:
        pretrained: The folder and what config.json says.
        path: The folder of the tokenizer.
    """

    pretrained: Pretrained
    path: Path

    @classmethod
    def open(cls, path: str, model: ModelConfig | None = None) -> OpenedModel:
        """Opens a folder or a model of the hub.

        Args:
            path: The folder, or the model's name.
            model: The run's section of it, which may add tokens.

        Raises:
            CheckpointError: If there is no such model, or a file of it is missing or damaged.
            UnsupportedModelError: If it asks for something that is not computed here.
        """
        pretrained = Pretrained.open(path)
        assert pretrained.folder is not None
        texts = pretrained.folder.text_folder
        if model is None or not model.adds_tokens:
            return cls(pretrained, texts)
        tokenizer = extended_tokenizer(texts, model.add_tokens, model.add_special_tokens)
        resized = pretrained.resized(tokenizer.count, tokenizer.new_tokens)
        return cls(resized, tokenizer.folder)

    def for_adapter(self, adapter: str | None) -> OpenedModel:
        """The same base with the tokens that an adapter has added to its own, if any.

        Raises:
            CheckpointError: If the adapter does not fit.
        """
        if adapter is None:
            return self
        stacking = self.architecture.stacking
        tensors, stored = load_adapter(adapter, biases=True, stacking=stacking)
        return replace(self, pretrained=self.pretrained.for_adapter(stored, tensors))

    @property
    def architecture(self) -> Architecture:
        """The model's architecture, as config.json describes it."""
        return self.pretrained.architecture

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before training."""
        return self.architecture.notes + self.pretrained.notes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read the first time that it is asked for.

        Raises:
            TokenizerError: If the folder has none, or it is damaged.
        """
        return Tokenizer.from_folder(self.path)


def device_of(settings: DeviceConfig) -> Device:
    """The GPU that a configuration names.

    Raises:
        DeviceError: If there is none such.
    """
    device = Device(
        settings.gpu,
        settings.backend,
        dispatches_per_submit=settings.dispatches_per_submit,
        submit_milliseconds=settings.submit_milliseconds,
        timeout=settings.timeout,
        memory=settings.memory_bytes,
    )
    avoid_what_is_wrong(device)
    return device


def checking_device(settings: DeviceConfig) -> Device:
    """The same GPU once more, for checks of kernels.

    They are over before a run takes anything, and take a few MiB whatever its budget is.

    Raises:
        DeviceError: If there is none such.
    """
    return device_of(settings.model_copy(update={"memory": "auto"}))


def open_device(settings: DeviceConfig, observer: Observer) -> Device:
    """Opens the GPU of a configuration.

    Raises:
        DeviceError: If there is none.
    """
    observer.activity("opening the device")
    device = device_of(settings)
    observer.activity("")
    for text in (*device.notes, faster_through_dawn(device, settings.backend)):
        if text:
            observer.note(text)
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
    total, done = layout.weights.num_tensors, 0

    def progress(name: str) -> None:
        nonlocal done
        observer.loading(name, done, total)
        done += 1

    model = QLoRAModel(layout, device, seed=seed, options=options, progress=progress)
    observer.loading("", total, total)
    if layout.placement.problem:
        observer.warning(layout.placement.problem)
    if layout.began:
        observer.note(layout.began)
    return model


def opened_as_trained(
    settings: Config, adapter: str | None, observer: Observer, explicit: Changes | None = None
) -> Config:
    """The settings with which a base and an adapter are opened; all that opens them asks here.

    An adapter that belongs to a run is opened as the run's config.yaml says it was trained.

    Args:
        settings: For what is known of no run.
        adapter: Folder of a PEFT adapter, or None for the base alone.
        observer: Who is told where they are not, or may not be, what the adapter was trained with.
        explicit: What the user asked for, whatever the run says.

    Raises:
        ConfigError: If the run's config.yaml is damaged, or a value of ``explicit`` is wrong.
    """
    explicit = explicit or {}
    if adapter is None:
        return changed(settings, explicit)
    trained = as_trained(settings, adapter, explicit)
    if find_run(adapter) is None and is_dir(Path(adapter).expanduser()):
        observer.note(
            f"{adapter} belongs to no run, so how it was trained is not known: it is opened with "
            f"{_in_words(_numerics(trained))}"
        )
    return trained


def tell_differences(settings: Config, opened: Config, adapter: str, observer: Observer) -> None:
    """Tells where an adapter is opened with other settings than a configuration names."""
    before, after = _decisive(settings), _decisive(opened)
    other = {key: value for key, value in after.items() if value != before[key]}
    if other:
        observer.note(
            f"{adapter} is opened as it was trained, by its run's config.yaml: {_in_words(other)} "
            "in place of what the configuration says"
        )


def _decisive(settings: Config) -> dict[str, Any]:
    """By their names, the settings that say what an opened model computes, and where."""
    device = settings.device
    return {
        **_numerics(settings),
        "device.gpu": device.gpu,
        "device.backend": device.backend,
    }


def _numerics(settings: Config) -> dict[str, Any]:
    quant = {f"quant.{key}": value for key, value in settings.quant.model_dump().items()}
    return {**quant, "train.compute_dtype": settings.train.compute_dtype}


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {str(v).lower()}" for key, v in values.items())


def configs_of(source: OpenedModel, folders: Iterable[str]) -> tuple[LoraConfig, ...]:
    """What adapters beside the first one are: their ranks, scalings and targets.

    Raises:
        CheckpointError: If one is damaged or does not fit the base.
    """
    of, configs = source.architecture, []
    for folder in folders:
        tensors, stored = load_adapter(folder, biases=True, stacking=of.stacking)
        configs.append(config_of(stored, tensors, of))
    return tuple(configs)


def load_adapted(
    source: OpenedModel,
    adapter: str | None,
    settings: Config,
    observer: Observer,
    reading: Reading | None = None,
    *,
    with_notes: bool = True,
) -> QLoRAModel:
    """A model with an adapter, or with one that does nothing.

    Args:
        source: The base.
        adapter: Folder of a PEFT adapter, or None.
        settings: From ``opened_as_trained``.
        observer: Who is told how far the weights are.
        reading: What will be computed, so that it keeps within ``device.memory``; texts by default.
        with_notes: Whether the observer is told what the base's files hold otherwise than one might
            think.

    Raises:
        CheckpointError: If the adapter or the weights are damaged or do not fit.
        DeviceError: If there is no usable GPU.
        OutOfMemoryError: If nothing makes it fit.
    """
    for text in source.pretrained.notes if with_notes else ():
        observer.note(text)
    lora = LoraConfig(r=1, lora_alpha=1)
    pretrained = source.pretrained.without_new()
    tensors: Mapping[str, Any] | None = None
    start: Mapping[str, Any] | None = None
    if adapter is not None:
        stacking = source.architecture.stacking
        tensors, stored = load_adapter(adapter, biases=True, stacking=stacking)
        lora, tensors, stored, start = as_begun(adapter, stored, tensors, source.architecture)
        pretrained = pretrained.for_adapter(stored, tensors)
    device = device_of(settings.device)
    layout = device_layout(
        pretrained,
        lora,
        settings.quant,
        settings.train.compute_dtype,
        device,
        keep=settings.model.cache,
    )
    if adapter is not None and tensors is not None:
        shapes, routers = layout.adapter.shapes, source.architecture.routers
        refuse_other_base(adapter, stored, tensors, shapes, settings.model.path, routers=routers)
    if start is not None:
        layout.adapter.start = layout.adapter.join(start)
    layout = read_within_room(
        layout, reading or Texts.of(pretrained), device, observer, settings.device.keep_dequantized
    )
    model = load_model(layout, device, observer)
    if adapter is not None and tensors is not None:
        model.load_adapter(tensors)
        model.name_folder(adapter)
    return model
