"""A run's state on disk: the adapter as PEFT reads it, its moments, the figures, and the best."""

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

# ---- a run's figures -----------------------------------------------------------------------------


@dataclass
class RunState:
    """Figures of a run so far."""

    step: int = 0  # steps done
    num_tokens: int = 0  # tokens trained on, padding not counted
    logged_step: int = 0  # the last step that metrics.jsonl has a row of
    # Of each step since the last logged one: loss sum, label tokens, hits (None from an older
    # version), and the sum of the losses that balance experts
    window: list[tuple[float, float, float | None, float]] = field(default_factory=list)
    # Sums of an objective over answers in these steps (``ops/preference.py``)
    metrics: list[float] = field(default_factory=list)
    learning_rate: float = 0.0  # the last step's
    grad_norm: float = 0.0  # the last step's
    last_loss: float | None = None  # mean loss of the last logged steps
    eval_loss_before: float | None = None  # held-out loss before the first step
    eval_loss: float | None = None  # the latest one, after ``eval_step`` steps
    eval_step: int = -1  # when it was measured
    best_loss: float | None = None  # held-out loss of the best evaluation
    best_step: int = -1  # when it was measured
    # The figure that made it the best; None from an older version, where it was the loss
    best_figure: float | None = None
    aim: str = EvalConfig().aim  # what makes an evaluation the best: ``EvalConfig.aim``
    without_gain: int = 0  # evaluations in a row that were not better by the user's threshold
    finished: bool = False  # whether the run has ended, with all that belongs to its end
    seconds: float = 0.0  # time that its parts have taken, from each one's first step on
    total_steps: int = 0  # steps that the run was to have; 0 where an older version did not say
    plateau: Plateau | None = None  # the schedule's, where it follows evaluations
    # What the user's program has the schedule's learning rates multiplied by
    rate_factor: float = 1.0
    # A hash of the rows in metrics.jsonl; None where an older version kept none
    log_digest: str | None = None

    def add_metrics(self, sums: Sequence[float]) -> None:
        """Adds a step's sums of an objective over answers; an older version kept fewer."""
        both = zip_longest(self.metrics, sums, fillvalue=0.0)
        self.metrics = [before + own for before, own in both]

    def to_json(self) -> str:
        """The state as text, from which floats come back bit by bit."""
        return json.dumps(asdict(self), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> RunState:
        """Reads it back."""
        try:
            values: dict[str, Any] = json.loads(text)
            state = cls(**values)
            state.window = [_figures(*figures) for figures in state.window]
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

    def evaluated(self, loss: float, figure: float, step: int, settings: EvalConfig) -> bool:
        """Notes an evaluation by the figure that is to be best; whether it is."""
        self.eval_loss, self.eval_step = loss, step
        gain = math.inf
        if self.best_figure is not None:
            sign = 1.0 if settings.more_is_better else -1.0
            gain = sign * (figure - self.best_figure)
        counts = gain > settings.early_stopping_threshold
        self.without_gain = 0 if counts else self.without_gain + 1
        if gain <= 0:
            return False
        self.best_loss, self.best_figure, self.best_step = loss, figure, step
        return True

    def forget_best(self) -> None:
        """The next evaluation is the best one."""
        self.best_loss, self.best_figure, self.best_step = None, None, -1
        self.without_gain = 0


def _figures(
    loss: Any, count: Any, hits: Any = None, balance: Any = 0.0
) -> tuple[float, float, float | None, float]:
    """A step's sums, as JSON has them."""
    return float(loss), float(count), None if hits is None else float(hits), float(balance)


# ---- the best adapter ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BestAdapter:
    """An adapter's parameters, the held-out figures with them, and the steps done."""

    step: int  # the steps done
    loss: float  # the held-out loss
    figure: float  # what it is the best by
    aim: str  # what is best: ``EvalConfig.aim``
    parameters: FloatArray  # in their order on the device
    is_saved: bool = False  # whether it is on the disk


def save_best(folder: Path, model: AdapterModel, best: BestAdapter) -> BestAdapter:
    """Writes an adapter; the model has its own again afterwards."""
    present = model.read_flat(model.adapter.parameters).copy()
    model.write_parameters(best.parameters)
    try:
        with atomic_folder(folder) as unfinished:
            model.save_adapter(unfinished)
            known = {"step": best.step, "eval_loss": best.loss}
            write_manifest(unfinished, {**known, "figure": best.figure, "aim": best.aim})
    finally:
        model.write_parameters(present)
    return replace(best, is_saved=True)


def load_best(folder: Path, model: AdapterModel, aim: str) -> BestAdapter | None:
    """The adapter that a folder holds; None without one, or with one of another aim."""
    if not exists(folder):
        return None
    manifest = read_manifest(folder)
    try:
        parameters = model.adapter.join(
            read_started(folder, *load_adapter(folder), model.adapter)[0]
        )
        step, loss = int(manifest["step"]), float(manifest["eval_loss"])
        figure, its_aim = manifest.get("figure", loss), manifest.get("aim", EvalConfig().aim)
        best = BestAdapter(step, loss, float(figure), str(its_aim), parameters, True)
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{folder / MANIFEST} is of no best adapter") from err
    return best if best.aim == aim else None


# ---- checkpoints ---------------------------------------------------------------------------------

_MOMENTS, _STATE = "optimizer.safetensors", "trainer_state.json"


def save_checkpoint(
    folder: Path, model: AdapterModel, state: RunState, identity: Mapping[str, Any]
) -> None:
    """Writes everything that a run needs to go on; the folder appears whole or not at all.

    Data order and dropout follow from the seed and the step, so they need no state.
    """
    adapter = model.adapter
    with atomic_folder(folder) as unfinished:
        model.save_adapter(unfinished)
        flats = [model.read_flat(each) for each in adapter.moments.vectors]
        write_safetensors(unfinished / _MOMENTS, adapter.moments.split(flats))
        (unfinished / _STATE).write_text(state.to_json(), encoding="utf-8")
        write_manifest(unfinished, {"step": state.step, **identity})


def load_checkpoint(
    folder: Path, model: AdapterModel, refuse_other: Callable[[Mapping[str, Any]], None]
) -> RunState:
    """Puts a checkpoint's adapter and moments onto the device."""
    manifest = read_manifest(folder)
    refuse_other(manifest)
    path = folder / _STATE
    try:
        state = RunState.from_json(file_text(path, OWN_JSON_BYTES), str(path))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path} cannot be read: {reason(err)}") from err
    if not state.step == manifest["step"] == step_of(folder):
        raise CheckpointError(f"{folder} holds the state after step {state.step}")
    adapter = model.adapter
    parameters = adapter.join(read_started(folder, *load_adapter(folder), adapter)[0])
    with SafetensorsFile(folder / _MOMENTS) as file:
        moments = adapter.moments.join({name: file.raw(name) for name in file.names()})
    model.write_parameters(parameters)
    for moment, values in zip(adapter.moments.vectors, moments, strict=True):
        model.write_flat(moment, values)
    return state


def start_of(folders: list[Path]) -> Mapping[str, npt.NDArray[np.float32]] | None:
    """What a run's adapter began as, if that is a part of its base; by one of its checkpoints."""
    for folder in reversed(folders):
        with suppress(CheckpointError):
            started = started_in(folder, *load_adapter(folder))
            return None if started is None else started.start
    return None


def load_newest(
    folders: list[Path], model: AdapterModel, refuse_other: Callable[[Mapping[str, Any]], None]
) -> tuple[Path, RunState, list[str]]:
    """Loads the newest checkpoint that is whole."""
    passed: list[str] = []
    for folder in reversed(folders):
        try:
            return folder, load_checkpoint(folder, model, refuse_other), passed
        except CheckpointError as err:
            passed.append(f"{folder.name} is passed over: {err}")
    raise CheckpointError(
        f"no checkpoint can be loaded ({'; '.join(passed) or 'there is none'}): train without "
        f"{option('resume')}, into another output.dir or with {option('overwrite')}"
    )
