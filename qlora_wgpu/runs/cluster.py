"""A run on a cluster: what its owner plans, and what a worker holds and computes."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from qlora_wgpu.cluster.blocks import (
    DIVERGENCE,
    NO_DIVERGENCE,
    BlockRequest,
    BlockResult,
    FloatArray,
    SampledTokens,
    Samples,
    WorkerInfo,
    WorkerSpec,
    answers_of,
)
from qlora_wgpu.cluster.owner import Cluster
from qlora_wgpu.cluster.serving import GPU_VARIABLE, MODEL_VARIABLE
from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import changed
from qlora_wgpu.errors import ClusterError, ConfigError, OutOfMemoryError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.gpu.adapters import cards
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.grpo.rollouts import Prompt, sample_completions
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.image_inputs import ImageFeatures, ImageInputs
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import ScoreInputs, StepKind
from qlora_wgpu.ops.optimizers import (
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LENGTH,
    STATS_LOSS,
    STATS_METRICS,
    STATS_TOKENS,
)
from qlora_wgpu.runs.opening import (
    OpenedModel,
    checking_device,
    device_of,
    load_training,
    place_training,
    verified_layout,
)
from qlora_wgpu.runs.placement import limit_of, with_fitting_rollouts
from qlora_wgpu.runs.prompts import writer_of
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.settings import load_init_from
from qlora_wgpu.runs.workload import (
    RolloutShape,
    RunShapes,
    TrainingWorkload,
    owner_memory,
    update_plan,
    zeroing,
)
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.executor import MicroBatch
from qlora_wgpu.version import __version__
from qlora_wgpu.visible import visible


class _Notes(Observer):
    """Collects the notes that a worker sends to the owner."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    warning = note


class Worker:
    """The frozen base and the adapter on a worker's device. Its calls come one at a time."""

    def __init__(self, specification: WorkerSpec) -> None:
        if specification.version != __version__:
            raise ClusterError(
                f"it has qlora-wgpu {__version__}, but the owner has {specification.version}: "
                "install the same version on both"
            )
        settings = _worker_settings(Config(**specification.settings), specification.gpu)
        self._notes = _Notes()
        self._model, self._rollouts = _opened(settings, specification, self._notes)
        self._engine: Engine | None = None  # of completions
        self._zero = self._model.programs.from_graph(zeroing(self._model.layout))
        self._version = -1
        self._shapes: set[tuple[str, bool, int, int]] = set()
        self._write = writer_of(self._model)
        shape = settings.rows_at_once, specification.length
        self._compile("train", shape, images=specification.images)

    def identity(self) -> WorkerInfo:
        """Its device, version and hashes; waits until the base weights are hashed."""
        model = self._model
        info = model.device.gpu.info
        return WorkerInfo(
            device=model.device.name,
            driver=str(info["description"]),
            kernels=repr(dataclasses.astuple(model.layout.profile)),
            memory=model.device.memory.total,
            version=__version__,
            base=model.folder.fingerprint,
            adapter=model.adapter.shapes,
            notes=tuple(self._notes.texts),
        )

    def refused(self, sentence: str) -> None:
        """Prints on this machine why the owner refused it."""
        print(f"error: {visible(sentence)}", flush=True)

    def neutral(self, request: BlockRequest) -> FloatArray:
        """A flat adapter that changes nothing: with DoRA it holds the norms of the base's rows."""
        return self._model.neutral

    def write(self, version: int, parameters: FloatArray) -> None:
        """Replaces the adapter's parameters by those of a new version."""
        self._model.write_parameters(parameters)
        self._version = version

    def gradient(
        self, request: BlockRequest, batch: MicroBatch, divergence: tuple[float, float]
    ) -> BlockResult:
        """The summed gradient, loss, label tokens and hits of a micro-batch, or its metrics.

        ``divergence`` is the sum over all answers of the step, and their number.
        """
        model = self._model
        with self._turn(request, "train", batch.ids, batch.images) as began:
            self._zero.run()
            self._begin(divergence)
            model.accumulate(
                batch.ids, batch.targets, batch.mask, dropout_key=batch.dropout_key,
                weights=batch.weights, samples=batch.samples, images=batch.images,
            )  # fmt: skip
            return self._sums(request, began, "train", model.read_flat(model.adapter.gradient))

    def divergence(self, request: BlockRequest, batch: MicroBatch) -> BlockResult:
        """A micro-batch's divergence from the reference model; no gradient."""
        return self._measured("divergence", request, batch, NO_DIVERGENCE)

    def answer_loss(
        self, request: BlockRequest, batch: MicroBatch, divergence: tuple[float, float]
    ) -> BlockResult:
        """Loss and metrics of a micro-batch's answers; no gradient."""
        return self._measured("loss", request, batch, divergence)

    def answer_logps(self, request: BlockRequest, batch: MicroBatch) -> BlockResult:
        """The summed log probability of each answer of a micro-batch."""
        count = len(answers_of(batch).references)
        with self._turn(request, "sums", batch.ids, batch.images) as began:
            given = batch.ids, batch.targets, batch.mask, count
            logps = self._model.answer_logps(*given, images=batch.images)
            return _logps(request, began, logps)

    def scores(self, request: BlockRequest, batch: MicroBatch) -> BlockResult:
        """The scores of a micro-batch's sequences, their loss and metrics; no gradient."""
        assert isinstance(batch.samples, ScoreInputs)
        with self._turn(request, "loss", batch.ids) as began:
            self._begin(NO_DIVERGENCE)
            scores = self._model.scores(batch.ids, batch.mask, batch.samples)
            sums = self._sums(request, began, "loss")
            return dataclasses.replace(sums, scores=scores.ravel())

    def token_logps(self, request: BlockRequest, batch: MicroBatch) -> BlockResult:
        """The log probability of each target of a micro-batch."""
        with self._turn(request, "logps", batch.ids) as began:
            logps = self._model.token_logps(batch.ids, batch.targets, batch.mask)
            return _logps(request, began, logps.ravel())

    def loss(
        self, request: BlockRequest, ids: Any, labels: Any, mask: Any, images: ImageInputs | None
    ) -> BlockResult:
        """The loss summed over a batch's labels, their number and hits; no gradient."""
        with self._turn(request, "loss", ids, images) as began:
            loss, tokens, correct = self._model.summed_loss([(ids, labels, mask, images)])
            seconds = time.perf_counter() - began
            return BlockResult(
                loss, float(tokens), 0, seconds, correct=float(correct), nonce=request.nonce
            )

    def complete(self, request: BlockRequest, given: Samples) -> SampledTokens:
        """A completion of each prompt, sampled with its seed."""
        self._require(request.version)
        assert self._rollouts is not None  # the run samples completions
        engine = self._engine or Engine(
            self._model, self._rollouts.count, self._rollouts.capacity, packs_weights=False
        )
        self._engine = None  # after an error, its requests are dropped with it
        completions = sample_completions(
            engine, [Prompt(ids, "") for ids in given.prompts], given.sampling, given.seeds,
            max_completion_length=given.max_completion_length, stop_ids=given.stop_ids,
        )  # fmt: skip
        self._engine = engine
        assert completions is not None  # it was not stopped
        ids = np.array([token for each in completions for token in each.ids], np.int32)
        lengths = np.array([len(each.ids) for each in completions], np.int32)
        return SampledTokens(ids, lengths, request.nonce)

    def text(
        self, request: BlockRequest, ids: list[int], more: int, stop_ids: list[int], longest: int,
        *images: ImageFeatures,
    ) -> list[int]:  # fmt: skip
        """The greedy continuation of a prompt."""
        self._require(request.version)
        return self._write(ids, more, stop_ids, longest, *images)

    def _require(self, version: int) -> None:
        if version != self._version:
            raise ClusterError(f"it has version {self._version} of the parameters, not {version}")

    @contextmanager
    def _turn(
        self, request: BlockRequest, kind: StepKind, ids: Any, images: ImageInputs | None = None
    ) -> Iterator[float]:
        """The device's turn with the requested parameters; yields when computing begins."""
        self._require(request.version)
        with self._model.device.in_turn:
            self._compile(kind, ids.shape, images=images is not None)
            yield time.perf_counter()

    def _measured(
        self, kind: Literal["loss", "divergence"], request: BlockRequest, batch: MicroBatch,
        divergence: tuple[float, float],
    ) -> BlockResult:  # fmt: skip
        with self._turn(request, kind, batch.ids, batch.images) as began:
            self._begin(divergence)
            given = batch.ids, batch.targets, batch.mask, batch.samples, batch.images
            self._model.measure(kind, *given)
            return self._sums(request, began, kind)

    def _begin(self, divergence: tuple[float, float]) -> None:
        """Zeroes all sums but the divergence, which KTO's losses read."""
        stats = np.zeros(STATS_LENGTH, np.float32)
        stats[STATS_METRICS:][DIVERGENCE] = divergence
        self._model.write_stats(stats)

    def _sums(
        self, request: BlockRequest, began: float, kind: StepKind,
        gradient: FloatArray | None = None,
    ) -> BlockResult:  # fmt: skip
        """The sums of everything that ran since ``began``; waits for the device."""
        model, stats = self._model, self._model.read_stats()
        metrics = stats[STATS_METRICS:].copy()
        has_answers = model.options.objective.preference is not None
        if has_answers and kind != "divergence":  # the owner has added it up already
            metrics[DIVERGENCE] = 0.0
        saturated = model.count_saturated() + (model.kept_saturated if kind == "train" else 0)
        places = STATS_LOSS, STATS_TOKENS, STATS_CORRECT, STATS_BALANCE
        loss, tokens, correct, balance = (float(stats[i]) for i in places)
        seconds = time.perf_counter() - began
        return BlockResult(
            loss, tokens, saturated, seconds, gradient, correct, balance, metrics,
            nonce=request.nonce,
        )  # fmt: skip

    def _compile(self, kind: StepKind, shape: tuple[int, int], *, images: bool) -> None:
        """Compiles the programs of a shape; that time is not measured."""
        if (kind, images, *shape) not in self._shapes:
            self._shapes.add((kind, images, *shape))
            self._model.program(kind, *shape, images=images)


def _logps(request: BlockRequest, began: float, logps: FloatArray) -> BlockResult:
    return BlockResult(0.0, 0.0, 0, time.perf_counter() - began, logps=logps, nonce=request.nonce)


def _worker_settings(settings: Config, gpu: str | None) -> Config:
    """The run's settings with this worker's own GPU and model path."""
    gpu = os.environ.get(GPU_VARIABLE) or gpu
    path = os.environ.get(MODEL_VARIABLE)
    changes: dict[str, dict[str, Any]] = {}
    if gpu:
        changes["device"] = {"gpu": gpu}
    if path:
        changes["model"] = {"path": path}
    return changed(settings, changes)


def _opened(
    settings: Config, given: WorkerSpec, observer: Observer
) -> tuple[QLoRAModel, RolloutShape | None]:
    """The model, and how many completions at once it has memory for."""
    source = OpenedModel.open(base_in(settings), settings.model).for_objective(settings.train)
    device = device_of(settings.device)
    workload = TrainingWorkload.of(
        settings, source.pretrained, given.length, RunShapes(**given.shapes),
        None if given.rollouts is None else RolloutShape(**given.rollouts), images=given.images,
    )  # fmt: skip
    workload = with_fitting_rollouts(workload.on_worker, device)
    placed = place_training(settings, workload, None, device, observer)
    return load_training(settings, placed, device, observer, Observer()), workload.rollouts


@contextmanager
def opened_cluster(
    settings: Config, source: OpenedModel, workload: TrainingWorkload, device: Device,
    observer: Observer,
) -> Iterator[tuple[AdapterModel, Cluster]]:  # fmt: skip
    """The adapter on the owner's device, and the workers, which have opened the base."""
    if settings.lora.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {settings.lora.init_lora_weights} is not supported on a "
            "cluster: train on one device, or set it to default"
        )
    folder = source.pretrained.folder
    assert folder is not None and workload.shapes is not None
    layout = _owner_layout(settings, workload, device, observer)
    folder.finish_fingerprint()
    gpus = _gpus(settings)
    shapes, shapes_of_run = layout.adapter.shapes, asdict(workload.shapes)
    rollouts = None if workload.rollouts is None else asdict(workload.rollouts)

    def specify(name: str) -> WorkerSpec:
        own = gpus[int(name) % len(gpus)] if settings.cluster.scheduler == "local" else None
        length, has_images = workload.step.seq, workload.step.image_rows > 0
        return WorkerSpec(
            settings.model_dump(), length, __version__, shapes_of_run, own, rollouts, has_images
        )

    def check(identity: WorkerInfo) -> str | None:
        return _problem(identity, folder.fingerprint, shapes)

    observer.activity("connecting to workers")
    count = settings.cluster.workers
    processes = len(gpus) if count == "auto" else int(count)
    with closing(
        Cluster(settings.cluster, Worker, specify, check, observer.warning, processes=processes)
    ) as cluster:
        observer.activity("opening the model on workers")
        identities = cluster.wait_for(max(processes, 1))
        observer.activity("")
        note_workers(identities, settings.train.gradient_accumulation_steps, cluster, observer)
        options = training_options(settings.train, weighted=settings.data.has_weights)
        model = AdapterModel(layout, device, options=options)
        cluster.take(model)
        start = model.adapter.initial(settings.train.seed)
        if settings.lora.use_dora or model.adapter.trained_rows or model.adapter.trained_whole:
            start = start + cluster.neutral()
        model.write_parameters(start)
        load_init_from(model, settings.lora)
        yield model, cluster


def _owner_layout(
    settings: Config, workload: TrainingWorkload, device: Device, observer: Observer
) -> ModelPlan:

    def launches(layout: ModelPlan) -> Iterator[Launch]:
        yield from update_plan(layout, workload.optim).launches

    layout = workload.layout(device)
    memory = owner_memory(layout, workload.optim)
    memory += Counter({"reward models": workload.reward_models})
    observer.planned(memory)
    _require_room(memory, device)
    layout = verified_layout(
        device, lambda: checking_device(settings.device), launches, layout, observer
    )
    layout.make_room_for_counts()
    return layout


def _require_room(memory: Counter[str], device: Device) -> None:
    """Refuses an adapter that does not fit on the owner's device, before workers are started."""
    limit, needed = limit_of(device), memory.total()
    if limit is not None and needed > limit:
        raise OutOfMemoryError(
            "the owner of this run (adapter, gradients, moments, reward models) needs "
            f"{needed / MIB:,.1f} MiB of device memory, {(needed - limit) / MIB:,.1f} MiB more "
            f"than the {limit / MIB:,.1f} MiB available: lower lora.r, set optim.name to "
            "adamw_8bit, or raise device.memory"
        )


def _gpus(settings: Config) -> list[str]:
    """The GPUs that local workers use in turn: ``device.gpu``, or all of this machine."""
    if settings.cluster.scheduler != "local":
        return []
    if settings.device.gpu != "auto":
        return [settings.device.gpu]
    return cards(settings.device.backend) or ["auto"]


def _problem(
    identity: WorkerInfo, base: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> str | None:
    if identity.base["weights"] != base["weights"]:
        return "its base weights differ: copy the same model there, or name it with --model"
    if identity.base != base:
        return "its base has another config.json: copy the same model there"
    if identity.adapter != shapes:
        return "its adapter has other shapes although the base is the same"
    return None


def note_workers(
    identities: dict[str, WorkerInfo], blocks: int, cluster: Cluster, observer: Observer
) -> None:
    """Notes how many workers there are, on which devices, and whether some are idle."""
    kinds: dict[str, list[str]] = {}
    for name, identity in identities.items():
        kinds.setdefault(identity.device, []).append(name)
    there = "; ".join(f"{', '.join(names)} on {device}" for device, names in kinds.items())
    noun = "worker" if len(identities) == 1 else "workers"
    observer.note(f"{len(identities)} {noun}: {there}")
    if blocks < len(identities):
        observer.note(
            f"a step has fewer micro-batches ({blocks}) than there are workers, so some are idle: "
            "set train.gradient_accumulation_steps to a multiple of the number of workers"
        )
    if (link := cluster.dashboard) is not None:
        observer.note(f"Dask's dashboard is at {link}")
