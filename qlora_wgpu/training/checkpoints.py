"""A run's state on disk: checkpoints with adapter, moments and metrics, and the best adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import (
    SafetensorsFile,
    atomic_folder,
    read_manifest,
    write_manifest,
    write_safetensors,
)
from qlora_wgpu.checkpoint.manifest import MANIFEST
from qlora_wgpu.config import EvalConfig
from qlora_wgpu.errors import CheckpointError, option, reason
from qlora_wgpu.files import exists, file_text
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.model.adapter_model import AdapterModel, FloatArray
from qlora_wgpu.model.adapter_state import read_started
from qlora_wgpu.training.optimizer import Plateau
from qlora_wgpu.training.run_folder import step_of

# ---- the state of a run --------------------------------------------------------------------------


@dataclass
class RunState:
    """The progress and metrics of a run (``trainer_state.json``)."""

    step: int = 0  # steps done
    num_tokens: int = 0  # tokens trained on, without padding
    logged_step: int = 0  # the last step with a row in metrics.jsonl
    # Of each step since the last logged one: loss sum, label tokens, hits (None from an older
    # version), and the sum of the load-balancing losses of experts
    window: list[tuple[float, float, float | None, float]] = field(default_factory=list)
    # Sums of DPO, ORPO or KTO metrics in these steps (``ops/preference.py``)
    metrics: list[float] = field(default_factory=list)
    # Metrics of GRPO or RLOO in these steps, each with its sum and the number of values
    averages: dict[str, list[float]] = field(default_factory=dict)
    learning_rate: float = 0.0  # the last step's
    grad_norm: float = 0.0  # the last step's
    last_loss: float | None = None  # mean loss of the last logged steps
    eval_loss_before: float | None = None  # held-out loss before the first step
    eval_loss: float | None = None  # the latest held-out loss
    eval_step: int = -1  # the step of its evaluation
    best_loss: float | None = None  # held-out loss of the best evaluation
    best_step: int = -1  # the step of that evaluation
    # Its metric_for_best_model; None from an older version, which used the loss
    best_figure: float | None = None
    aim: str = EvalConfig().aim  # the criterion of the best evaluation: ``EvalConfig.aim``
    without_gain: int = 0  # consecutive evaluations that did not improve by the threshold
    finished: bool = False  # whether the run has ended and its adapter is written
    seconds: float = 0.0  # time since the first step, without interruptions
    total_steps: int = 0  # planned number of steps; 0 from an older version
    plateau: Plateau | None = None  # the state of reduce_lr_on_plateau
    # The factor of the schedule's learning rates, set by a callback
    rate_factor: float = 1.0
    # A hash of the rows in metrics.jsonl; None from an older version
    log_digest: str | None = None

    def add_metrics(self, sums: Sequence[float]) -> None:
        """Adds a step's sums of DPO, ORPO or KTO metrics; older versions stored fewer."""
        both = zip_longest(self.metrics, sums, fillvalue=0.0)
        self.metrics = [before + own for before, own in both]

    def add_averages(self, values: Mapping[str, float]) -> None:
        """Adds metrics whose mean over the steps is logged, unless they are not finite."""
        for name, value in values.items():
            if math.isfinite(value):
                total, count = self.averages.get(name, (0.0, 0))
                self.averages[name] = [total + value, count + 1]

    def to_json(self) -> str:
        """The state as JSON, which keeps floats bit-exact."""
        return json.dumps(asdict(self), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> RunState:
        """Reads a state; ``where`` names it in errors."""
        try:
            values: dict[str, Any] = json.loads(text)
            state = cls(**values)
            state.window = [_sums(*sums) for sums in state.window]
            state.metrics = [float(value) for value in state.metrics]
            state.plateau = Plateau(**values["plateau"]) if values.get("plateau") else None
            if state.best_figure is None and state.aim == EvalConfig().aim:
                state.best_figure = state.best_loss
            step = int(state.step)
        except (ValueError, TypeError) as err:
            raise CheckpointError(f"{where} is damaged: {err}") from err
        if step < 0:
            raise CheckpointError(f"{where} is damaged: step {step}")
        return state

    def evaluated(self, loss: float, metric: float, step: int, settings: EvalConfig) -> bool:
        """Records an evaluation with its metric_for_best_model; whether it is the best."""
        self.eval_loss, self.eval_step = loss, step
        gain = math.inf
        if self.best_figure is not None:
            sign = 1.0 if settings.more_is_better else -1.0
            gain = sign * (metric - self.best_figure)
        counts = gain > settings.early_stopping_threshold
        self.without_gain = 0 if counts else self.without_gain + 1
        if gain <= 0:
            return False
        self.best_loss, self.best_figure, self.best_step = loss, metric, step
        return True

    def forget_best(self) -> None:
        """Makes the next evaluation the best one."""
        self.best_loss, self.best_figure, self.best_step = None, None, -1
        self.without_gain = 0


def _sums(
    loss: Any, count: Any, hits: Any = None, balance: Any = 0.0
) -> tuple[float, float, float | None, float]:
    return float(loss), float(count), None if hits is None else float(hits), float(balance)


# ---- the best adapter ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BestAdapter:
    """The parameters of the adapter with the best evaluation, and its metrics."""

    step: int  # the steps done
    loss: float  # the held-out loss
    metric: float  # its metric_for_best_model
    aim: str  # the criterion: ``EvalConfig.aim``
    parameters: FloatArray  # in their order on the device
    is_saved: bool = False  # whether it is on disk


def save_best(folder: Path, model: AdapterModel, best: BestAdapter) -> BestAdapter:
    """Writes the best adapter; the model's parameters are unchanged."""
    current = model.read_flat(model.adapter.parameters).copy()
    model.write_parameters(best.parameters)
    try:
        with atomic_folder(folder) as unfinished:
            model.save_adapter(unfinished)
            known = {"step": best.step, "eval_loss": best.loss}
            write_manifest(unfinished, {**known, "metric": best.metric, "aim": best.aim})
    finally:
        model.write_parameters(current)
    return replace(best, is_saved=True)


def load_best(folder: Path, model: AdapterModel, aim: str) -> BestAdapter | None:
    """The best adapter in a folder; None if there is none, or one by another criterion."""
    if not exists(folder):
        return None
    manifest = read_manifest(folder)
    try:
        parameters = model.adapter.join(
            read_started(folder, *load_adapter(folder), model.adapter)[0]
        )
        step, loss = int(manifest["step"]), float(manifest["eval_loss"])
        metric, its_aim = manifest.get("metric", loss), manifest.get("aim", EvalConfig().aim)
        best = BestAdapter(step, loss, float(metric), str(its_aim), parameters, True)
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{folder / MANIFEST} does not describe a best adapter") from err
    return best if best.aim == aim else None


# ---- checkpoints ---------------------------------------------------------------------------------

_MOMENTS, _STATE = "optimizer.safetensors", "trainer_state.json"
_ROLLOUT = "rollout.safetensors"


def save_checkpoint(
    folder: Path, model: AdapterModel, state: RunState, identity: Mapping[str, Any],
    rollout: Mapping[str, npt.NDArray[np.generic]] | None = None,
) -> None:  # fmt: skip
    """Writes everything that a run needs to continue; the folder appears complete or not at all.

    Data order and dropout depend on the seed and the step only, so they need no state; ``rollout``
    has completions that later steps train on.
    """
    adapter = model.adapter
    with atomic_folder(folder) as unfinished:
        model.save_adapter(unfinished)
        flats = [model.read_flat(each) for each in adapter.moments.vectors]
        write_safetensors(unfinished / _MOMENTS, adapter.moments.split(flats))
        if rollout:
            write_safetensors(unfinished / _ROLLOUT, rollout)
        (unfinished / _STATE).write_text(state.to_json(), encoding="utf-8")
        write_manifest(unfinished, {"step": state.step, **identity})


def load_checkpoint(
    folder: Path, model: AdapterModel, refuse_other: Callable[[Mapping[str, Any]], None]
) -> RunState:
    """Loads a checkpoint's adapter and moments onto the device; returns the run's state."""
    manifest = read_manifest(folder)
    refuse_other(manifest)
    path = folder / _STATE
    try:
        state = RunState.from_json(file_text(path, OWN_JSON_BYTES), str(path))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"cannot read {path}: {reason(err)}") from err
    if not state.step == manifest["step"] == step_of(folder):
        raise CheckpointError(f"{folder} contains the state after step {state.step}")
    adapter = model.adapter
    parameters = adapter.join(read_started(folder, *load_adapter(folder), adapter)[0])
    with SafetensorsFile(folder / _MOMENTS) as file:
        moments = adapter.moments.join({name: file.raw(name) for name in file.names()})
    model.write_parameters(parameters)
    for moment, values in zip(adapter.moments.vectors, moments, strict=True):
        model.write_flat(moment, values)
    return state


def load_rollout(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """The completions that a checkpoint stores for later steps; empty if there are none."""
    if not exists(folder / _ROLLOUT):
        return {}
    with SafetensorsFile(folder / _ROLLOUT) as file:
        return {name: file.raw(name).copy() for name in file.names()}


def start_of(folders: list[Path]) -> Mapping[str, npt.NDArray[np.float32]] | None:
    """The initial adapter, if it is part of the base (PiSSA, OLoRA); from a checkpoint."""
    for folder in reversed(folders):
        with suppress(CheckpointError):
            started = started_in(folder, *load_adapter(folder))
            return None if started is None else started.start
    return None


def load_newest(
    folders: list[Path], model: AdapterModel, refuse_other: Callable[[Mapping[str, Any]], None]
) -> tuple[Path, RunState, list[str]]:
    """Loads the newest complete checkpoint; also returns why others were skipped."""
    skipped: list[str] = []
    for folder in reversed(folders):
        try:
            return folder, load_checkpoint(folder, model, refuse_other), skipped
        except CheckpointError as err:
            skipped.append(f"{folder.name} is skipped: {err}")
    raise CheckpointError(
        f"no checkpoint can be loaded ({'; '.join(skipped) or 'there is none'}): train without "
        f"{option('resume')}, into another output.dir or with {option('overwrite')}"
    )
