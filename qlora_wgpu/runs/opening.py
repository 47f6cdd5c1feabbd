"""Opens base models, devices and adapters, with kernels that the driver computes correctly."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qlora_wgpu.config import Config, DeviceConfig, LoraConfig, ModelConfig, TrainConfig
from qlora_wgpu.config.loading import Changes, as_trained, changed, find_run
from qlora_wgpu.config.sections.train import SCORED
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.tokenizer import extended_tokenizer
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.files import is_dir
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.gpu.adapters import BACKEND_VARIABLE, BACKENDS, installed_backends
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile, may_have_matrix_units
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.images.placeholders import ImageFiles, image_files
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
from qlora_wgpu.runs.workload import (
    GenerationWorkload,
    LossWorkload,
    TrainingWorkload,
    Workload,
)
from qlora_wgpu.selfcheck import avoid_what_is_wrong, give_way, problem_of, unsound
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.policies import policy_of
from qlora_wgpu.training.preferences import scoring_of
from qlora_wgpu.tuning.cache import key_of, known_keys, tuned
from qlora_wgpu.tuning.tuner import Task

# ---- the base ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedModel:
    """A base model's folder, config.json and tokenizer, each read once."""

    pretrained: Pretrained  # the folder and its config.json
    path: Path  # the folder of the tokenizer

    @classmethod
    def open(cls, path: str, model: ModelConfig | None = None) -> OpenedModel:
        """Opens a folder or a model of the hub; a run's ``model`` section may add tokens."""
        pretrained = Pretrained.open(path)
        assert pretrained.folder is not None
        texts = pretrained.folder.text_folder
        if model is None or not model.adds_tokens:
            return cls(pretrained, texts)
        tokenizer = extended_tokenizer(texts, model.add_tokens, model.add_special_tokens)
        resized = pretrained.resized(tokenizer.count, tokenizer.new_tokens)
        return cls(resized, tokenizer.folder)

    def for_adapter(self, adapter: str | None) -> OpenedModel:
        """The same base with the tokens that an adapter has added, if any."""
        if adapter is None:
            return self
        tensors, stored = self.read_adapter(adapter)
        return replace(self, pretrained=self.pretrained.for_adapter(stored, tensors))

    def for_objective(self, settings: TrainConfig) -> OpenedModel:
        """The same base, with the head of a reward model or classifier if one is trained."""
        scoring = scoring_of(settings)
        if scoring is None and self.architecture.classes:
            raise ConfigError(
                f"{self.pretrained.name_or_path} is a reward model or classifier, which "
                f"train.objective: {settings.objective} cannot train: use its language model, or "
                f"train.objective: {' or '.join(SCORED)}"
            )
        if scoring is None:
            return self
        return replace(self, pretrained=self.pretrained.scored(scoring.classes))

    def read_adapter(self, folder: str) -> tuple[dict[str, Float32Array], AdapterConfig]:
        """The tensors and the configuration of an adapter of this base."""
        return load_adapter(folder, biases=True, stacking=self.architecture.stacking)

    @property
    def architecture(self) -> Architecture:
        """The model's architecture, from config.json."""
        return self.pretrained.architecture

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before training."""
        return self.architecture.notes + self.pretrained.notes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The base's tokenizer, with added tokens."""
        return Tokenizer.from_folder(self.path)

    @cached_property
    def images(self) -> ImageFiles | None:
        """How prompts contain images; None if the model reads none."""
        folder = self.pretrained.folder
        if folder is None or self.architecture.images is None:
            return None
        return image_files(folder.path, folder.config, lambda i: self.tokenizer.token(i))


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
    """The same GPU, opened again to check kernels, without the run's memory budget.

    The checks end before the run allocates anything, and need a few MiB.
    """
    return device_of(settings.model_copy(update={"memory": "auto"}))


def open_device(settings: DeviceConfig, observer: Observer) -> Device:
    """Opens the GPU of a configuration and passes its notes to the observer."""
    observer.activity("opening the device")
    device = device_of(settings)
    observer.activity("")
    for text in (*device.notes, faster_through_dawn(device, settings.backend)):
        if text:
            observer.note(text)
    return device


_SLOW_MESA = 25  # since this version Mesa's software GPUs are slow through wgpu


def faster_through_dawn(device: Device, backend: str) -> str:
    """A hint that Dawn may be faster; empty if it is installed, or a backend was chosen.

    ``backend`` is the ``device.backend`` with which the device was opened.
    """
    dawn = BACKENDS["dawn"]
    chosen = os.environ.get(BACKEND_VARIABLE, "auto") if backend == "auto" else backend
    if chosen != "auto" or dawn in installed_backends():
        return ""
    info = device.gpu.info
    if not device.is_cpu:
        if not may_have_matrix_units(info):
            return ""
        return (
            f"{device.name} may have matrix units, which make steps faster but are available "
            f"through Dawn only: {dawn.install} (docs/performance.md)"
        )
    mesa = re.search(r"\bMesa (\d+)", info["description"])
    if mesa is None or int(mesa[1]) < _SLOW_MESA:
        return ""
    return f"with {mesa[0]} steps take about half as long through Dawn: {dawn.install}"


# ---- verified and tuned kernels ------------------------------------------------------------------

VERIFY_VARIABLE = "QLORA_WGPU_VERIFY_DRIVER"
# Multiply-adds of a few minutes; in a shorter run tuning costs more than it gains.
_WORTH_TUNING = {True: 2e13, False: 2e15}  # by Device.is_cpu


def verified_layout(
    device: Device,
    open_device: Callable[[], Device],
    launches_of: Callable[[ModelPlan], Iterator[Launch]],
    layout: ModelPlan,
    observer: Observer,
) -> ModelPlan:
    """A model laid out with kernels that the driver computes correctly.

    Kernels are checked once per driver, on the same GPU opened again, unless the environment
    variable ``QLORA_WGPU_VERIFY_DRIVER`` is 0. If the driver refuses or miscomputes one, the
    device's profile falls back to plainer kernels, and the observer gets a note.
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
        observer.note(f"{problem}; {_fallback(profile)} instead")
        layout = layout.changed(profile=profile)


def _fallback(profile: Profile) -> str:
    if profile.gemm_kind == "matrix":
        return "attention uses workgroup memory"
    if profile.gemm_kind == "tiled":
        return "matrix products use workgroup memory"
    return "kernels without workgroup memory are used"


def tune_device(
    settings: DeviceConfig, device: Device, task: Task, architecture: Architecture,
    tokens: int | None, observer: Observer,
) -> None:  # fmt: skip
    """Gives the device the fastest known profile; kernels are timed first if the run is long.

    ``tokens`` estimates the run's length; with None, only earlier measurements are used.
    """
    if settings.tune == "never":
        return
    if key_of(device, task) not in known_keys():
        if tokens is None:
            return
        if settings.tune == "auto" and _work(architecture, tokens) < _WORTH_TUNING[device.is_cpu]:
            return
    observer.activity("timing kernels")
    choice = tuned(device, task, lambda: checking_device(settings), observer.activity)
    observer.activity("")
    observer.tuned(choice.notes)


def _work(architecture: Architecture, tokens: int) -> float:
    """Operations of the matrix products: two each for the forward pass and the inputs' gradient."""
    weights = sum(spec.out_features * spec.in_features for spec in architecture.every_linear)
    return 4.0 * tokens * (weights + architecture.vocab_size * architecture.hidden_size)


# ---- models for training -------------------------------------------------------------------------


def place_training(
    settings: Config, workload: TrainingWorkload, tokens: int | None, device: Device,
    observer: Observer,
) -> Placement:  # fmt: skip
    """Places a training workload, with tuned kernels (``tokens`` as for ``tune_device``)."""
    keep = settings.device.keep_dequantized

    def laid_out() -> ModelPlan:
        plain = workload.layout(device, keep=settings.model.cache)
        return laid_out_for(plain, keep, is_cpu=device.is_cpu, budget=device.budget)

    layout = laid_out()
    layout.memory(workload.step)  # refuses what is too large before kernels are timed
    base = workload.pretrained
    task = Task(
        base.config, workload.lora, workload.quant, settings.train.compute_dtype,
        workload.step.batch, workload.step.seq,
    )  # fmt: skip
    tune_device(settings.device, device, task, base.architecture, tokens, observer)
    if device.profile != layout.profile:
        layout = laid_out()
    layout.step(workload.step)  # this one runs if everything fits
    return fit(workload, layout, device, observer, keep)


def load_training(
    settings: Config, placed: Placement, device: Device, observer: Observer,
    loading_observer: Observer,
) -> QLoRAModel:  # fmt: skip
    """Loads the model of a placed training workload; one observer gets the loading progress."""
    workload = placed.workload
    assert isinstance(workload, TrainingWorkload) and workload.pretrained.folder is not None
    workload.pretrained.folder.start_fingerprint()  # for checkpoints
    layout = verified_layout(
        device, lambda: checking_device(settings.device), workload.launches, placed.layout, observer
    )
    options = training_options(
        settings.train, weighted=settings.data.has_weights, policy=policy_of(settings)
    )
    options = replace(options, checkpointing=workload.step.checkpointing)
    return load_model(layout, device, loading_observer, seed=settings.train.seed, options=options)


def load_model(
    layout: ModelPlan,
    device: Device,
    observer: Observer,
    *,
    seed: int = 0,
    options: TrainingOptions | None = None,
) -> QLoRAModel:
    """Loads a layout's weights and reports each tensor to the observer."""
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
    """The settings with which a base and an adapter are opened, for all commands.

    ``explicit`` settings of the user come first, then those of the adapter's run, from its
    config.yaml, then ``settings``.
    """
    explicit = explicit or {}
    if adapter is None:
        return changed(settings, explicit)
    trained = as_trained(settings, adapter, explicit)
    if find_run(adapter) is None and is_dir(Path(adapter).expanduser()):
        observer.note(
            f"{adapter} belongs to no run, so its training settings are unknown: it is opened with "
            f"{_in_words(_numerics(trained))}"
        )
    return trained


def note_differences(settings: Config, opened: Config, adapter: str, observer: Observer) -> None:
    """Notes where an adapter is opened with other settings than those of a configuration."""
    before, after = _decisive(settings), _decisive(opened)
    other = {key: value for key, value in after.items() if value != before[key]}
    if other:
        observer.note(
            f"{adapter} is opened with the settings of its run's config.yaml: {_in_words(other)} "
            "instead of those of the configuration"
        )


def _decisive(settings: Config) -> dict[str, Any]:
    """The settings that determine what an opened model computes, and where, by name."""
    device = {f"device.{key}": getattr(settings.device, key) for key in ("gpu", "backend")}
    return {**_numerics(settings), **device}


def _numerics(settings: Config) -> dict[str, Any]:
    quant = {f"quant.{key}": value for key, value in settings.quant.model_dump().items()}
    return {**quant, "train.compute_dtype": settings.train.compute_dtype}


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {str(v).lower()}" for key, v in values.items())


def configs_of(source: OpenedModel, folders: Iterable[str]) -> tuple[LoraConfig, ...]:
    """The ranks, scalings and targets of further adapters."""
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
    """Loads a model with an adapter, or with a neutral one, by settings ``opened_as_trained``.

    The workload, generation by default, keeps to ``device.memory``. ``with_notes`` passes notes on
    the base's files to the observer.
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
    if workload is None:
        is_scored = pretrained.architecture.classes > 0
        workload = (
            LossWorkload.of_scores(pretrained) if is_scored else GenerationWorkload.of(pretrained)
        )
    keep = settings.device.keep_dequantized
    layout = fit(workload, layout, device, observer, keep).layout
    model = load_model(layout, device, observer)
    if adapter is not None and tensors is not None:
        model.load_adapter(tensors)
        model.name_folder(adapter)
    return model
