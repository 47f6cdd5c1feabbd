"""A base model opened once for a whole run, with kernels that its driver computes right."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qlora_wgpu.config import Config, DeviceConfig, LoraConfig, ModelConfig
from qlora_wgpu.config.loading import Changes, as_trained, changed, find_run
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.new_tokens import extended_tokenizer
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.files import is_dir
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.gpu.adapters import BACKEND_VARIABLE, BACKENDS, installed_backends
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile, may_have_matrix_units
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.compatibility import refuse_other_base
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import Float32Array
from qlora_wgpu.model.adapter_state import as_begun, config_of
from qlora_wgpu.model.memory_plan import laid_out_for
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.runs.placement import Placement, fit
from qlora_wgpu.runs.workload import GenerationWorkload, TrainingWorkload, Workload
from qlora_wgpu.selfcheck import avoid_what_is_wrong, give_way, problem_of, unsound
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.tuning.cache import key_of, known_keys, tuned
from qlora_wgpu.tuning.tuner import Task

# ---- the base ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedModel:
    """A base model's folder, config.json's meaning and tokenizer, each read once."""

    pretrained: Pretrained  # the folder and what config.json says
    path: Path  # the folder of the tokenizer

    @classmethod
    def open(cls, path: str, model: ModelConfig | None = None) -> OpenedModel:
        """Opens a folder or a model of the hub; the run's section of it may add tokens."""
        pretrained = Pretrained.open(path)
        assert pretrained.folder is not None
        texts = pretrained.folder.text_folder
        if model is None or not model.adds_tokens:
            return cls(pretrained, texts)
        tokenizer = extended_tokenizer(texts, model.add_tokens, model.add_special_tokens)
        resized = pretrained.resized(tokenizer.count, tokenizer.new_tokens)
        return cls(resized, tokenizer.folder)

    def for_adapter(self, adapter: str | None) -> OpenedModel:
        """The same base with the tokens that an adapter has added to its own, if any."""
        if adapter is None:
            return self
        tensors, stored = self.read_adapter(adapter)
        return replace(self, pretrained=self.pretrained.for_adapter(stored, tensors))

    def read_adapter(self, folder: str) -> tuple[dict[str, Float32Array], AdapterConfig]:
        """The tensors and the configuration of an adapter of it."""
        return load_adapter(folder, biases=True, stacking=self.architecture.stacking)

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
        """Read the first time that it is asked for."""
        return Tokenizer.from_folder(self.path)


# ---- the device ----------------------------------------------------------------------------------


def device_of(settings: DeviceConfig) -> Device:
    """The GPU that a configuration names."""
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
    """
    return device_of(settings.model_copy(update={"memory": "auto"}))


def open_device(settings: DeviceConfig, observer: Observer) -> Device:
    """Opens the GPU of a configuration."""
    observer.activity("opening the device")
    device = device_of(settings)
    observer.activity("")
    for text in (*device.notes, faster_through_dawn(device, settings.backend)):
        if text:
            observer.note(text)
    return device


_FASTER_SINCE = 25  # of Mesa: its later software GPUs are slow through wgpu


def faster_through_dawn(device: Device, backend: str) -> str:
    """A sentence where Dawn may be the faster one; empty where it is there, or wgpu was asked for.

    ``backend`` is the ``device.backend`` that the device was opened by.
    """
    dawn = BACKENDS["dawn"]
    asked = os.environ.get(BACKEND_VARIABLE, "auto") if backend == "auto" else backend
    if asked != "auto" or dawn in installed_backends():
        return ""
    info = device.gpu.info
    if not device.is_cpu:
        if not may_have_matrix_units(info):
            return ""
        return (
            f"{device.name} may have matrix units, which make steps faster and which kernels reach "
            f"through Dawn alone: {dawn.install} (docs/performance.md)"
        )
    mesa = re.search(r"\bMesa (\d+)", info["description"])
    if mesa is None or int(mesa[1]) < _FASTER_SINCE:
        return ""
    return f"with {mesa[0]} steps take about half as long through Dawn: {dawn.install}"


# ---- kernels that the driver computes right, and fast --------------------------------------------

VERIFY_VARIABLE = "QLORA_WGPU_VERIFY_DRIVER"
# Multiply-adds' worth of a few minutes: what tuning may gain in less does not pay for it.
_WORTH = {True: 2e13, False: 2e15}  # by Device.is_cpu


def verified_layout(
    device: Device,
    open_device: Callable[[], Device],
    launches_of: Callable[[ModelPlan], Iterator[Launch]],
    layout: ModelPlan,
    observer: Observer,
) -> ModelPlan:
    """A run's model laid out in kernels that the driver computes rightly.

    They are checked the first time that a driver meets them, on the same GPU opened once more,
    unless the environment's ``QLORA_WGPU_VERIFY_DRIVER`` is 0. What it refuses or computes wrongly
    gives way to plainer kernels, which is told, and the device's profile is set.
    """
    if os.environ.get(VERIFY_VARIABLE) == "0":
        return layout
    while True:
        graph, launches = layout.new_graph(), launches_of(layout)
        problem = problem_of(device, open_device, graph, launches, observer.activity)
        observer.activity("")
        if not problem:
            return layout
        profile = give_way(device)
        if profile is None:
            raise unsound(problem)
        observer.note(f"{problem}; {_instead(profile)} instead")
        layout = layout.changed(profile=profile)


def _instead(profile: Profile) -> str:
    if profile.gemm_kind == "matrix":
        return "attention goes through workgroup memory"
    if profile.gemm_kind == "tiled":
        return "products go through workgroup memory"
    return "kernels without workgroup memory are used"


def tune_device(
    settings: DeviceConfig, device: Device, task: Task, architecture: Architecture,
    tokens: int | None, observer: Observer,
) -> None:  # fmt: skip
    """Gives the device the fastest known profile, timing kernels first if the run is long.

    About so many ``tokens`` will be computed; with None nothing is timed that is not known.
    """
    if settings.tune == "never":
        return
    if key_of(device, task) not in known_keys():
        if tokens is None:
            return
        if settings.tune == "auto" and _work(architecture, tokens) < _WORTH[device.is_cpu]:
            return
    observer.activity("timing kernels")
    choice = tuned(device, task, lambda: checking_device(settings), observer.activity)
    observer.activity("")
    observer.tuned(choice.notes)


def _work(architecture: Architecture, tokens: int) -> float:
    """Operations of the products: two each for the forward and the gradient of their inputs."""
    weights = sum(spec.out_features * spec.in_features for spec in architecture.every_linear)
    return 4.0 * tokens * (weights + architecture.vocab_size * architecture.hidden_size)


# ---- a training's model --------------------------------------------------------------------------


def place_training(
    settings: Config, workload: TrainingWorkload, tokens: int | None, device: Device,
    observer: Observer,
) -> Placement:  # fmt: skip
    """Places a training in kernels that are cut as the tuner finds best.

    About so many ``tokens`` will be computed; with None nothing is timed that is not known.
    """
    asked = settings.device.keep_dequantized

    def laid_out() -> ModelPlan:
        plain = workload.layout(device, keep=settings.model.cache)
        return laid_out_for(plain, asked, is_cpu=device.is_cpu, budget=device.budget)

    layout = laid_out()
    layout.memory(workload.step)  # what is too large is said before kernels are timed
    base = workload.pretrained
    task = Task(
        base.config, workload.lora, workload.quant, settings.train.compute_dtype,
        workload.batch, workload.seq,
    )  # fmt: skip
    tune_device(settings.device, device, task, base.architecture, tokens, observer)
    if device.profile != layout.profile:
        layout = laid_out()
    layout.step(workload.step)  # which runs, where all of it fits
    return fit(workload, layout, device, observer, asked)


def load_training(
    settings: Config, placed: Placement, device: Device, observer: Observer, told: Observer
) -> QLoRAModel:
    """A placed training's model on its device; ``told`` is who is told how far the weights are."""
    workload = placed.workload
    assert isinstance(workload, TrainingWorkload) and workload.pretrained.folder is not None
    workload.pretrained.folder.start_fingerprint()  # checkpoints keep it
    layout = verified_layout(
        device, lambda: checking_device(settings.device), workload.launches, placed.layout, observer
    )
    options = training_options(settings.train, weighted=settings.data.has_weights)
    options = replace(options, checkpointing=workload.checkpointing)
    return load_model(layout, device, told, seed=settings.train.seed, options=options)


def load_model(
    layout: ModelPlan,
    device: Device,
    observer: Observer,
    *,
    seed: int = 0,
    options: TrainingOptions | None = None,
) -> QLoRAModel:
    """Loads a layout's weights, telling the observer of each tensor."""
    total, done = len(layout.weights.table), 0

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


# ---- adapters as they were trained ---------------------------------------------------------------


def opened_as_trained(
    settings: Config, adapter: str | None, observer: Observer, explicit: Changes | None = None
) -> Config:
    """The settings with which a base and an adapter are opened; all that opens them asks here.

    An adapter that belongs to a run is opened as the run's config.yaml says it was trained, but for
    what the user asked for (``explicit``); ``settings`` are for what is known of no run.
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
    device = {f"device.{key}": getattr(settings.device, key) for key in ("gpu", "backend")}
    return {**_numerics(settings), **device}


def _numerics(settings: Config) -> dict[str, Any]:
    quant = {f"quant.{key}": value for key, value in settings.quant.model_dump().items()}
    return {**quant, "train.compute_dtype": settings.train.compute_dtype}


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {str(v).lower()}" for key, v in values.items())


def configs_of(source: OpenedModel, folders: Iterable[str]) -> tuple[LoraConfig, ...]:
    """What adapters beside the first one are: their ranks, scalings and targets."""
    adapters = map(source.read_adapter, folders)
    return tuple(config_of(stored, tensors, source.architecture) for tensors, stored in adapters)


def load_adapted(
    source: OpenedModel,
    adapter: str | None,
    settings: Config,
    observer: Observer,
    workload: Workload | None = None,
    *,
    with_notes: bool = True,
) -> QLoRAModel:
    """A model with an adapter, or with one that does nothing, by settings ``opened_as_trained``.

    The workload, texts by default, keeps within ``device.memory``. ``with_notes`` says whether the
    observer is told what the base's files hold otherwise than one might think.
    """
    for text in source.pretrained.notes if with_notes else ():
        observer.note(text)
    lora = LoraConfig(r=1, lora_alpha=1)
    pretrained = source.pretrained.without_new()
    tensors: Mapping[str, Any] | None = None
    start: Mapping[str, Any] | None = None
    if adapter is not None:
        tensors, stored = source.read_adapter(adapter)
        lora, tensors, stored, start = as_begun(adapter, stored, tensors, source.architecture)
        pretrained = pretrained.for_adapter(stored, tensors)
    device = device_of(settings.device)
    layout = device_layout(
        pretrained, lora, settings.quant, settings.train.compute_dtype, device,
        keep=settings.model.cache,
    )  # fmt: skip
    if adapter is not None and tensors is not None:
        refuse_other_base(adapter, stored, tensors, layout.adapter.shapes, settings.model.path)
    if start is not None:
        layout.adapter.start = layout.adapter.join(start)
    workload = workload or GenerationWorkload.of(pretrained)
    asked = settings.device.keep_dequantized
    layout = fit(workload, layout, device, observer, asked).layout
    model = load_model(layout, device, observer)
    if adapter is not None and tensors is not None:
        model.load_adapter(tensors)
        model.name_folder(adapter)
    return model
