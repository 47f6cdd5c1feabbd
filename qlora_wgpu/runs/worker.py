"""What a worker of a cluster does: it holds the base, and computes micro-batches for the owner."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, Literal

import numpy as np

from qlora_wgpu.cluster.actor import WorkerInfo, WorkerSpec
from qlora_wgpu.cluster.blocks import DIVERGENCE, NO_DIVERGENCE, Asked, BlockResult, FloatArray
from qlora_wgpu.cluster.serving import GPU_VARIABLE, MODEL_VARIABLE
from qlora_wgpu.config import Config
from qlora_wgpu.config.as_trained import changed
from qlora_wgpu.errors import ClusterError
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import PreferenceInputs, StepKind
from qlora_wgpu.ops.optimizers import (
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LENGTH,
    STATS_LOSS,
    STATS_METRICS,
    STATS_TOKENS,
)
from qlora_wgpu.runs.opening import OpenedModel, device_of, load_training, place_training
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.samples import writer_of
from qlora_wgpu.runs.workload import RunShapes, TrainingWorkload, zeroing
from qlora_wgpu.training import Observer
from qlora_wgpu.version import __version__
from qlora_wgpu.visible import visible


class _Notes(Observer):
    """Keeps what the owner is to be told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Keeps it."""
        self.texts.append(text)

    warning = note


class Worker:
    """The frozen base and the adapter on a worker's device; its calls come one at a time."""

    def __init__(self, specification: WorkerSpec) -> None:
        """Opens the model."""
        if specification.version != __version__:
            raise ClusterError(
                f"it has qlora-wgpu {__version__}, and this machine {specification.version}: "
                "install the same version on both"
            )
        settings = _own(Config(**specification.settings), specification.gpu)
        self._notes = _Notes()
        shapes = RunShapes(**specification.shapes)
        self._model = _opened(settings, specification.length, shapes, self._notes)
        self._zero = self._model.programs.from_graph(zeroing(self._model.layout))
        self._version = -1
        self._shapes: set[tuple[str, int, int]] = set()
        self._write = writer_of(self._model)
        self._prepare("train", settings.rows_at_once, specification.length)

    def identity(self) -> WorkerInfo:
        """What it is; waits until the base weights are hashed."""
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
        """Shows on this machine why the owner lets it do nothing."""
        print(f"error: {visible(sentence)}", flush=True)

    def neutral(self, asked: Asked) -> FloatArray:
        """A flat adapter that does nothing: with DoRA it has the norms of the base's rows."""
        return self._model.neutral

    def write(self, version: int, parameters: FloatArray) -> None:
        """Takes the adapter's parameters, which have a number from now on."""
        self._model.write_parameters(parameters)
        self._version = version

    def gradient(
        self, asked: Asked, ids: Any, targets: Any, mask: Any, dropout_key: int | None,
        weights: Any = None, samples: PreferenceInputs | None = None,
        divergence: tuple[float, float] = NO_DIVERGENCE,
    ) -> BlockResult:  # fmt: skip
        """A micro-batch's summed gradient, loss, label tokens and hits, or metrics of its answers.

        Args:
            asked: With which parameters, and the number that comes back.
            ids: As in ``MicroBatch``, and so are the next five.
            targets: What each position predicts.
            mask: 0 for padding, else numbers of samples.
            dropout_key: Of its dropout masks and noise, or None.
            weights: Of its targets, or None.
            samples: What an objective over answers knows of them, or None.
            divergence: Of all answers of the step from the reference, and over how many it is
                summed.
        """
        self._require(asked.version)
        model = self._model
        with model.device.in_turn:
            self._prepare("train", *ids.shape)
            began = time.perf_counter()
            self._zero.run()
            self._begin(divergence)
            model.accumulate(
                ids, targets, mask, dropout_key=dropout_key, weights=weights, samples=samples
            )
            return self._sums(asked, began, "train", model.read_flat(model.adapter.gradient))

    def divergence(
        self, asked: Asked, ids: Any, targets: Any, mask: Any, samples: PreferenceInputs
    ) -> BlockResult:
        """How far a micro-batch's answers are from what the reference says; no gradient."""
        return self._measured("divergence", asked, ids, targets, mask, samples, NO_DIVERGENCE)

    def answer_loss(
        self, asked: Asked, ids: Any, targets: Any, mask: Any, samples: PreferenceInputs,
        divergence: tuple[float, float],
    ) -> BlockResult:  # fmt: skip
        """Loss and metrics of a micro-batch's answers; no gradient."""
        return self._measured("loss", asked, ids, targets, mask, samples, divergence)

    def answer_logps(
        self, asked: Asked, ids: Any, targets: Any, mask: Any, count: int
    ) -> BlockResult:
        """The summed log probabilities of so many answers."""
        self._require(asked.version)
        with self._model.device.in_turn:
            self._prepare("sums", *ids.shape)
            began = time.perf_counter()
            said = self._model.answer_logps(ids, targets, mask, count)
            return BlockResult(
                0.0, 0.0, 0, time.perf_counter() - began, answers=said, nonce=asked.nonce
            )

    def loss(self, asked: Asked, ids: Any, labels: Any, mask: Any) -> BlockResult:
        """The loss summed over a batch's labels, their number and hits; no gradient."""
        self._require(asked.version)
        with self._model.device.in_turn:
            self._prepare("loss", *ids.shape)
            began = time.perf_counter()
            loss, tokens, correct = self._model.summed_loss([(ids, labels, mask)])
            seconds = time.perf_counter() - began
            return BlockResult(
                loss, float(tokens), 0, seconds, correct=float(correct), nonce=asked.nonce
            )

    def text(
        self, asked: Asked, ids: list[int], more: int, stop_ids: list[int], longest: int
    ) -> list[int]:
        """A text's continuation, greedily."""
        self._require(asked.version)
        return self._write(ids, more, stop_ids, longest)

    def _require(self, version: int) -> None:
        if version != self._version:
            raise ClusterError(f"it has parameters {self._version}, not {version}")

    def _measured(
        self, kind: Literal["loss", "divergence"], asked: Asked, ids: Any, targets: Any, mask: Any,
        samples: PreferenceInputs, divergence: tuple[float, float],
    ) -> BlockResult:  # fmt: skip
        self._require(asked.version)
        with self._model.device.in_turn:
            self._prepare(kind, *ids.shape)
            began = time.perf_counter()
            self._begin(divergence)
            self._model.measure(kind, ids, targets, mask, samples)
            return self._sums(asked, began, kind)

    def _begin(self, divergence: tuple[float, float]) -> None:
        """Clears the sums but for the divergence, from which KTO's losses measure."""
        stats = np.zeros(STATS_LENGTH, np.float32)
        stats[STATS_METRICS:][DIVERGENCE] = divergence
        self._model.write_stats(stats)

    def _sums(
        self, asked: Asked, began: float, kind: StepKind, gradient: FloatArray | None = None
    ) -> BlockResult:
        """The sums of what ran since then; waits."""
        model, stats = self._model, self._model.read_stats()
        metrics = stats[STATS_METRICS:].copy()
        if kind != "divergence":  # which the owner has added up already
            metrics[DIVERGENCE] = 0.0
        saturated = model.count_saturated() + (model.kept_saturated if kind == "train" else 0)
        places = STATS_LOSS, STATS_TOKENS, STATS_CORRECT, STATS_BALANCE
        loss, tokens, correct, balance = (float(stats[i]) for i in places)
        seconds = time.perf_counter() - began
        return BlockResult(
            loss, tokens, saturated, seconds, gradient, correct, balance, metrics,
            nonce=asked.nonce,
        )  # fmt: skip

    def _prepare(self, kind: StepKind, batch: int, seq: int) -> None:
        """Compiles a shape, which does not count as computing."""
        if (kind, batch, seq) not in self._shapes:
            self._shapes.add((kind, batch, seq))
            self._model.program(kind, batch, seq)


def _own(settings: Config, gpu: str | None) -> Config:
    """The settings with what is this worker's own."""
    gpu = os.environ.get(GPU_VARIABLE) or gpu
    path = os.environ.get(MODEL_VARIABLE)
    changes: dict[str, dict[str, Any]] = {}
    if gpu:
        changes["device"] = {"gpu": gpu}
    if path:
        changes["model"] = {"path": path}
    return changed(settings, changes)


def _opened(settings: Config, length: int, shapes: RunShapes, observer: Observer) -> QLoRAModel:
    """The model on its device, in kernels that its driver computes rightly."""
    source = OpenedModel.open(base_in(settings), settings.model)
    device = device_of(settings.device)
    workload = TrainingWorkload.of(settings, source.pretrained, length, shapes).on_worker
    placed = place_training(settings, workload, None, device, observer)
    return load_training(settings, placed, device, observer, Observer())
