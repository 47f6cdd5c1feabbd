"""A base model opened once for a whole run, with kernels that its driver computes right."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from qlora_wgpu.gpu.adapters import BACKEND_VARIABLE, BACKENDS, installed_backends
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile, may_have_matrix_units
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.compatibility import refuse_other_base
from qlora_wgpu.model.adapter_state import as_begun, config_of, norms_graph
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import StepKind, TrainingOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.presence import is_dir
from qlora_wgpu.runs.inference_memory import GenerationWorkload, InferenceWorkload, read_within_room
from qlora_wgpu.runs.memory import text_plans
from qlora_wgpu.selfcheck import avoid_what_is_wrong, give_way, problem_of, unsound
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.optimizer import trace_update
from qlora_wgpu.training.schedule import STEP_NUMBERS

# ---- kernels that the driver computes right ------------------------------------------------------

VERIFY_VARIABLE = "QLORA_WGPU_VERIFY_DRIVER"
_TEXT = 64  # tokens: the shaders of a text do not depend on its length


def verified_layout(
    device: Device,
    open_device: Callable[[], Device],
    launches_of: Callable[[ModelPlan], Iterator[Launch]],
    layout: ModelPlan,
    observer: Observer,
) -> ModelPlan:
    """A run's model laid out in kernels that the driver computes rightly.

    They are checked the first time that a driver meets them, unless the environment's
    ``QLORA_WGPU_VERIFY_DRIVER`` is 0. What it refuses or computes wrongly gives way to plainer
    kernels, which is told.

    Args:
        device: What the run will use; its profile is set.
        open_device: Opens the same GPU once more.
        launches_of: All that will be launched of a layout.
        layout: The run's model, cut for the device.
        observer: Who is told.
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


def run_launches(settings: Config, layout: ModelPlan, length: int) -> Iterator[Launch]:
    """All that a run launches: steps, evaluations, updates and texts."""
    options = training_options(settings.train, weighted=settings.data.has_weights)
    rows = settings.rows_at_once
    if layout.dequantize_plan is not None:
        yield from layout.dequantize_plan.launches
    for kind in _kinds(options.objective.preference):
        yield from layout.step(options.step(kind, rows, length)).plan.launches
    yield from update_launches(settings, layout)
    for plan in text_plans(layout, KVCache(_TEXT), ((1, _TEXT), (1, 1))):
        yield from plan.launches
    if layout.profile.textures and layout.packed_sizes.fits:
        yield from _strip_launches(layout.changed(profile=layout.profile))
    if layout.adapter.config.use_dora:
        for name in layout.adapter.loras:
            graph, norms = norms_graph(layout, name)
            yield from compile_plan(graph, (norms,)).launches


def _kinds(preference: Preference | None) -> list[StepKind]:
    """What a run's steps are of, those of an objective over answers with its reference's."""
    kinds: list[StepKind] = ["train", "loss"]
    if preference is not None and preference.has_reference:
        kinds.append("sums")
    if preference is not None and preference.has_divergence:
        kinds.append("divergence")
    return kinds


def _strip_launches(own: ModelPlan) -> Iterator[Launch]:
    """All that new tokens launch with copies of the weights, and what fills those.

    Args:
        own: A layout of its own: what the plans ask of its copies is never filled.
    """
    for plan in text_plans(own, KVCache(_TEXT, packs_weights=True), ((1, 1),)):
        yield from plan.launches
    graph = own.new_graph()
    own.packed_weights.fill(graph)
    yield from compile_plan(graph).launches


def update_launches(settings: Config, layout: ModelPlan) -> Iterator[Launch]:
    """All that an update of the adapter launches."""
    yield from update_plan(settings, layout).launches


def update_plan(settings: Config, layout: ModelPlan) -> Plan:
    """An update of the adapter with its moments on the device."""
    graph, storage = layout.new_graph(), Storage("step info", "inputs", 4 * STEP_NUMBERS)
    info = vector("step_info", STEP_NUMBERS, "float32", storage)
    trace_update(graph, layout.adapter, layout.stats, info, settings.optim)
    return compile_plan(graph)


# ---- base and device -----------------------------------------------------------------------------


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
        """The same base with the tokens that an adapter has added to its own, if any."""
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
        """Read the first time that it is asked for."""
        return Tokenizer.from_folder(self.path)


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

    Args:
        device: What was opened.
        backend: The ``device.backend`` that it was opened by.
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

    An adapter that belongs to a run is opened as the run's config.yaml says it was trained.

    Args:
        settings: For what is known of no run.
        adapter: Folder of a PEFT adapter, or None for the base alone.
        observer: Who is told where they are not, or may not be, what the adapter was trained with.
        explicit: What the user asked for, whatever the run says.
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
    """What adapters beside the first one are: their ranks, scalings and targets."""
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
    reading: InferenceWorkload | None = None,
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
        refuse_other_base(adapter, stored, tensors, layout.adapter.shapes, settings.model.path)
    if start is not None:
        layout.adapter.start = layout.adapter.join(start)
    layout = read_within_room(
        layout,
        reading or GenerationWorkload.of(pretrained),
        device,
        observer,
        settings.device.keep_dequantized,
    )
    model = load_model(layout, device, observer)
    if adapter is not None and tensors is not None:
        model.load_adapter(tensors)
        model.name_folder(adapter)
    return model
