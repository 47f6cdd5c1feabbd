"""Learning rates by transformers' formulas, and AdamW or Lion for a model's adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.config.sections.train import PLATEAU, POLYNOMIAL_END
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.ops.moments import MomentsPart, moments_in_parts
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw, lion

# ---- learning rates ------------------------------------------------------------------------------

Steps = npt.NDArray[np.float64]
"""Steps, counted from 0, or one value for each of them."""

_TIMESCALE = 10_000  # of inverse_sqrt without warm-up


def warmup_steps(optim: OptimConfig, total: int) -> int:
    """The number of warm-up steps."""
    if optim.lr_scheduler_type in ("constant", PLATEAU):
        return 0
    return optim.warmup_steps or math.ceil(total * optim.warmup_ratio)


def learning_rates(optim: OptimConfig, total: int, steps: range | None = None) -> Steps:
    """The learning rate of each step from 0 on, by Hugging Face's schedule of that name.

    With a linear warm-up the first is 0, as there; ``reduce_lr_on_plateau`` starts at its rate.
    """
    selected = range(total) if steps is None else steps
    step = np.arange(selected.start, selected.stop, dtype=np.float64)
    warmup = warmup_steps(optim, total)
    given = dict(optim.lr_scheduler_kwargs)
    for absolute, share in (("min_lr", "min_lr_rate"), ("lr_end", "lr_end")):
        if absolute in given:  # relative to the peak, like all factors
            given[share] = given.pop(absolute) / optim.learning_rate
    if optim.lr_scheduler_type == "polynomial":
        given.setdefault("lr_end", POLYNOMIAL_END / optim.learning_rate)
    return optim.learning_rate * _FACTORS[optim.lr_scheduler_type](step, warmup, total, given)


Factors = Callable[[Steps, int, int, Mapping[str, Any]], Steps]
"""Factors of the peak rate, from steps, warm-up steps, total steps and lr_scheduler_kwargs."""


def _warm(after: Factors) -> Factors:
    """A schedule after a linear warm-up from zero."""

    def factors(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
        late = np.maximum(step, warmup)  # the schedule is undefined before its first step
        return np.where(step < warmup, step / max(warmup, 1), after(late, warmup, total, given))

    return factors


def _share(step: Steps, warmup: int, total: int) -> Steps:
    """The progress after warm-up, from 0 to 1."""
    share: Steps = np.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
    return share


def _wave(share: Steps, given: Mapping[str, Any]) -> Steps:
    """``num_cycles`` of a cosine; by default half of one, from 1 to 0."""
    wave: Steps = 0.5 * (1.0 + np.cos(np.pi * (2.0 * given.get("num_cycles", 0.5)) * share))
    return wave


def _above(factor: Steps, minimum: float) -> Steps:
    """Rescales factors in [0, 1] to [minimum, 1]."""
    return factor * (1.0 - minimum) + minimum


def _constant(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    return np.ones(len(step))


def _linear(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    return 1.0 - _share(step, warmup, total)


def _cosine(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    wave = _wave(_share(step, warmup, total), given)
    return _above(wave, given["min_lr_rate"]) if "min_lr_rate" in given else wave


def _restarts(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    share = _share(step, warmup, total)
    wave = 0.5 * (1.0 + np.cos(np.pi * ((given.get("num_cycles", 1) * share) % 1.0)))
    return np.where(share < 1.0, wave, 0.0)


def _polynomial(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    left = 1.0 - _share(step, warmup, total)
    return _above(left ** given.get("power", 1.0), given["lr_end"])


def _inverse_sqrt(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    timescale = given.get("timescale") or warmup or _TIMESCALE
    return 1.0 / np.sqrt((step - warmup + timescale) / timescale)


def _warmup_with_min_lr(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    first = given.get("warmup_lr_rate")
    if first is None:
        rising = (step + 1.0) / max(warmup, 1)
    else:
        rising = first + (1.0 - first) * step / max(warmup - 1, 1)
    share = (step - warmup + 1.0) / max(total - warmup, 1)
    falling = _above(_wave(share, given), given["min_lr_rate"])
    return np.where(step < warmup, rising, np.maximum(falling, 0.0))


def _warmup_stable_decay(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
    decay, minimum = given["num_decay_steps"], given.get("min_lr_ratio", 0.0)
    stable = given.get("num_stable_steps", total - warmup - decay)
    left = 1.0 - np.clip(step / max(warmup, 1), 0.0, 1.0)
    rising = _above(_falling(left, given.get("warmup_type", "linear"), {}), minimum)
    done = np.clip((step - warmup - stable) / max(decay, 1), 0.0, 1.0)
    falling = _above(_falling(done, given.get("decay_type", "cosine"), given), minimum)
    ends = (warmup + stable, warmup + stable + decay)
    return np.select(
        [step < warmup, step < ends[0], step < ends[1]],
        [rising, np.ones(len(step)), falling],
        minimum,
    )


def _falling(share: Steps, curve: str, given: Mapping[str, Any]) -> Steps:
    if curve == "cosine":
        return _wave(share, given)
    return 1.0 - (share if curve == "linear" else np.sqrt(share))


_FACTORS: dict[str, Factors] = {
    "constant": _constant,
    "constant_with_warmup": _warm(_constant),
    "linear": _warm(_linear),
    "cosine": _warm(_cosine),
    "cosine_with_restarts": _warm(_restarts),
    "cosine_with_min_lr": _warm(_cosine),
    "cosine_warmup_with_min_lr": _warmup_with_min_lr,
    "polynomial": _warm(_polynomial),
    "inverse_sqrt": _warm(_inverse_sqrt),
    "warmup_stable_decay": _warmup_stable_decay,
    PLATEAU: _constant,
}


# ---- the optimizer's kernel ----------------------------------------------------------------------

STEP_NUMBERS = 4
"""Columns of ``step_table``."""

_CACHED_STEPS = 4096


def step_table(
    optim: OptimConfig, total: int, steps: range | None = None
) -> npt.NDArray[np.float32]:
    """The kernel's numbers of step t = 1, 2, …: rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), rate of B."""
    selected = range(total) if steps is None else steps
    t = np.arange(selected.start, selected.stop, dtype=np.float64) + 1.0
    table = np.zeros((len(t), STEP_NUMBERS))
    table[:, 0] = learning_rates(optim, total, steps)
    table[:, 1] = 1.0 - optim.adam_beta1**t
    table[:, 2] = np.sqrt(1.0 - optim.adam_beta2**t)
    table[:, 3] = optim.loraplus_lr_ratio * table[:, 0]
    return table.astype(np.float32)


class Schedule:
    """The rows of ``step_table``, a few thousand at a time: a run may have a billion."""

    def __init__(self, optim: OptimConfig, total: int) -> None:
        self.fixed_rate: float | None = None  # replaces the schedule's rate from now on
        self.factor = 1.0  # multiplies the rates from now on
        self._optim = optim
        self._total = total
        self._steps = range(0)
        self._rows = np.zeros((0, STEP_NUMBERS), np.float32)
        self._rates = np.zeros(0)

    def row(self, step: int) -> npt.NDArray[np.float32]:
        """The row of step 1, 2, …."""
        at = self._at(step)
        row: npt.NDArray[np.float32] = self._rows[at]
        if self.fixed_rate is not None or self.factor != 1.0:
            row, rate = row.copy(), self.rate(step)
            row[0], row[3] = rate, self._optim.loraplus_lr_ratio * rate
        return row

    def rate(self, step: int) -> float:
        """The learning rate of step 1, 2, …, before it is rounded to float32."""
        return self.factor * self.planned(step)

    def planned(self, step: int) -> float:
        """The learning rate of a step without the factor."""
        at = self._at(step)
        return float(self._rates[at]) if self.fixed_rate is None else self.fixed_rate

    def _at(self, step: int) -> int:
        """The index of a step's row, computed if it is not cached."""
        if step - 1 not in self._steps:
            first = (step - 1) // _CACHED_STEPS * _CACHED_STEPS
            self._steps = range(first, min(first + _CACHED_STEPS, self._total))
            self._rows = step_table(self._optim, self._total, self._steps)
            self._rates = learning_rates(self._optim, self._total, self._steps)
        return self._steps.index(step - 1)


def trace_update(
    graph: Graph,
    adapter: AdapterLayout,
    stats: Tensor,
    info: Tensor,
    optim: OptimConfig,
    passing: Sequence[MomentsPart] = (),
) -> None:
    """Adds the launches of one update."""
    state = OptimizerState(
        parameters=adapter.parameters,
        gradient=adapter.gradient,
        moments=adapter.moments.vectors,
        step_info=info,
        stats=stats,
        split=adapter.b_begin,
        passing=passing,
    )
    config = OptimizerConfig(
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_epsilon=optim.adam_epsilon,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
    )
    if optim.name == "lion":
        lion(graph, state, config)
    else:
        adamw(graph, state, config, adapter.moments.blocks)


def _on_host(moment: ShardedVector) -> list[npt.NDArray[Any]]:
    """The host memory of a moment's shards, allocated the first time."""
    places = []
    for piece in moment.shards:
        assert piece.storage is not None
        if piece.storage.on_host is None:
            piece.storage.on_host = np.zeros(piece.columns, piece.dtype)
        places.append(piece.storage.on_host)
    return places


class Optimizer:
    """Clips and applies the summed gradient of a model."""

    def __init__(self, model: AdapterModel, optim: OptimConfig, total_steps: int) -> None:
        """Allocates the moments, zeroed, and compiles the update."""
        self._model = model
        self._trained = model.active_adapter
        self.schedule = Schedule(optim, total_steps)
        info = Storage("step info", "inputs", 4 * STEP_NUMBERS)
        self._info = vector("step_info", STEP_NUMBERS, "float32", info)
        graph, adapter = model.layout.new_graph(), model.adapter
        adapter.keep_moments(optim.name)
        zeros = adapter.moments.zeros()
        passing: Sequence[MomentsPart] = ()
        if model.layout.offload.host_moments:
            passing = moments_in_parts(
                [_on_host(each) for each in adapter.moments.vectors], adapter.moments.blocks
            )
        trace_update(graph, adapter, model.stats, self._info, optim, passing)
        self._program = model.programs.from_graph(graph)
        for moment in adapter.moments.vectors:
            model.write_flat(moment, zeros)

    def step(self, step: int) -> None:
        """Queues the update of step 1, 2, …, which also zeroes the gradient; does not wait."""
        if self._model.active_adapter != self._trained:
            raise ConfigError(
                f"adapter {self._model.active_adapter!r} is active, but {self._trained!r} is being "
                f"trained: call set_adapter({self._trained!r}) before the next step"
            )
        self._model.write_flat(self._info, self.schedule.row(step))
        self._program.run()
        self._model.parameters_changed = True


# ---- reduce_lr_on_plateau ------------------------------------------------------------------------

_FACTOR, _PATIENCE, _THRESHOLD, _EPS = 0.1, 10, 1e-4, 1e-8  # torch's defaults


@dataclass
class Plateau:
    """The state of torch's ``ReduceLROnPlateau``."""

    rate: float  # the learning rate from here on
    best: float | None = None  # the best metric so far
    bad: int = 0  # consecutive evaluations without improvement
    cooldown: int = 0  # number of the next evaluations that do not count

    def measured(self, metric: float, optim: OptimConfig, *, more_is_better: bool = False) -> bool:
        """Records the metric of an evaluation; whether it changes the learning rate.

        torch's mode is ``max`` if more is better, unless lr_scheduler_kwargs set it.
        """
        given = optim.lr_scheduler_kwargs
        sign = 1.0 if given.get("mode", "max" if more_is_better else "min") == "max" else -1.0
        if self.best is None or sign * metric > sign * self._threshold(self.best, given, sign):
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        if self.cooldown > 0:
            self.cooldown, self.bad = self.cooldown - 1, 0
        if self.bad <= given.get("patience", _PATIENCE):
            return False
        self.cooldown, self.bad = given.get("cooldown", 0), 0
        lower = max(self.rate * given.get("factor", _FACTOR), given.get("min_lr", 0.0))
        if self.rate - lower <= given.get("eps", _EPS):
            return False
        self.rate = lower
        return True

    def _threshold(self, best: float, given: dict[str, Any], sign: float) -> float:
        """The value that a metric must exceed to be an improvement."""
        threshold = sign * float(given.get("threshold", _THRESHOLD))
        if given.get("threshold_mode", "rel") == "rel":
            return best * (1.0 + threshold)
        return best + threshold


def first_plateau(config: Config, *, held_out: bool) -> Plateau | None:
    """The initial state of a run; None with a schedule by steps."""
    if config.optim.lr_scheduler_type != PLATEAU:
        return None
    if not held_out or config.eval.eval_steps == 0:
        needs = "eval.eval_steps above 0" if held_out else "data.eval or data.eval_split"
        raise ConfigError(
            f"optim.lr_scheduler_type {PLATEAU} depends on evaluations: set {needs}, or choose a "
            "schedule by steps such as cosine"
        )
    return Plateau(config.optim.learning_rate)
