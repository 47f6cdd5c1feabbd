"""AdamW or Lion for a model's adapter, and its learning rates by transformers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import OptimConfig
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
"""Steps counted from 0, or a number for each of them."""

_TIMESCALE = 10_000  # of inverse_sqrt without warm-up


def warmup_steps(optim: OptimConfig, total: int) -> int:
    """Steps of warm-up."""
    if optim.lr_scheduler_type in ("constant", PLATEAU):
        return 0
    return optim.warmup_steps or math.ceil(total * optim.warmup_ratio)


def learning_rates(optim: OptimConfig, total: int, steps: range | None = None) -> Steps:
    """The learning rate of each step from 0 on, as Hugging Face's schedules of its name give it.

    With a linear warm-up the first is 0, as there; ``reduce_lr_on_plateau`` begins with its rate.
    """
    wanted = range(total) if steps is None else steps
    step = np.arange(wanted.start, wanted.stop, dtype=np.float64)
    warmup = warmup_steps(optim, total)
    given = dict(optim.lr_scheduler_kwargs)
    for absolute, share in (("min_lr", "min_lr_rate"), ("lr_end", "lr_end")):
        if absolute in given:  # of the peak, as all factors are
            given[share] = given.pop(absolute) / optim.learning_rate
    if optim.lr_scheduler_type == "polynomial":
        given.setdefault("lr_end", POLYNOMIAL_END / optim.learning_rate)
    return optim.learning_rate * _FACTORS[optim.lr_scheduler_type](step, warmup, total, given)


Factors = Callable[[Steps, int, int, Mapping[str, Any]], Steps]
"""Shares of the peak rate, of steps, steps of warm-up, all steps, and the schedule's arguments."""


def _warm(after: Factors) -> Factors:
    """A schedule that begins with a linear warm-up from zero."""

    def factors(step: Steps, warmup: int, total: int, given: Mapping[str, Any]) -> Steps:
        late = np.maximum(step, warmup)  # so that nothing is computed before its time
        return np.where(step < warmup, step / max(warmup, 1), after(late, warmup, total, given))

    return factors


def _share(step: Steps, warmup: int, total: int) -> Steps:
    """The share of the steps after warm-up that is done."""
    share: Steps = np.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
    return share


def _wave(share: Steps, given: Mapping[str, Any]) -> Steps:
    """A cosine from one to zero, or as many as are asked for."""
    wave: Steps = 0.5 * (1.0 + np.cos(np.pi * (2.0 * given.get("num_cycles", 0.5)) * share))
    return wave


def _above(factor: Steps, least: float) -> Steps:
    """Factors between one and the least instead of zero."""
    return factor * (1.0 - least) + least


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
    decay, least = given["num_decay_steps"], given.get("min_lr_ratio", 0.0)
    stable = given.get("num_stable_steps", total - warmup - decay)
    left = 1.0 - np.clip(step / max(warmup, 1), 0.0, 1.0)
    rising = _above(_falling(left, given.get("warmup_type", "linear"), {}), least)
    done = np.clip((step - warmup - stable) / max(decay, 1), 0.0, 1.0)
    falling = _above(_falling(done, given.get("decay_type", "cosine"), given), least)
    ends = (warmup + stable, warmup + stable + decay)
    return np.select(
        [step < warmup, step < ends[0], step < ends[1]],
        [rising, np.ones(len(step)), falling],
        least,
    )


def _falling(share: Steps, curve: str, given: Mapping[str, Any]) -> Steps:
    """From one to zero along a curve."""
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


# ---- what the optimizer's kernel reads -----------------------------------------------------------

STEP_NUMBERS = 4
"""Numbers of a row of the table."""

_AT_ONCE = 4096


def step_table(
    optim: OptimConfig, total: int, steps: range | None = None
) -> npt.NDArray[np.float32]:
    """What AdamW's kernel reads at step t = 1, 2, …: rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), rate of B."""
    wanted = range(total) if steps is None else steps
    t = np.arange(wanted.start, wanted.stop, dtype=np.float64) + 1.0
    table = np.zeros((len(t), STEP_NUMBERS))
    table[:, 0] = learning_rates(optim, total, steps)
    table[:, 1] = 1.0 - optim.adam_beta1**t
    table[:, 2] = np.sqrt(1.0 - optim.adam_beta2**t)
    table[:, 3] = optim.loraplus_lr_ratio * table[:, 0]
    return table.astype(np.float32)


class Schedule:
    """The rows of ``step_table``, a few thousand at a time: a run may have a billion."""

    def __init__(self, optim: OptimConfig, total: int) -> None:
        """Makes nothing yet."""
        self.held: float | None = None  # a rate in place of the schedule's from now on
        self.factor = 1.0  # what rates are multiplied by from now on
        self._optim = optim
        self._total = total
        self._steps = range(0)
        self._rows = np.zeros((0, STEP_NUMBERS), np.float32)
        self._rates = np.zeros(0)

    def row(self, step: int) -> npt.NDArray[np.float32]:
        """The row of step 1, 2, …."""
        at = self._at(step)
        row: npt.NDArray[np.float32] = self._rows[at]
        if self.held is not None or self.factor != 1.0:
            row, rate = row.copy(), self.rate(step)
            row[0], row[3] = rate, self._optim.loraplus_lr_ratio * rate
        return row

    def rate(self, step: int) -> float:
        """The learning rate of step 1, 2, …, before it is rounded to float32."""
        return self.factor * self.planned(step)

    def planned(self, step: int) -> float:
        """The one that it would be without the factor."""
        at = self._at(step)
        return float(self._rates[at]) if self.held is None else self.held

    def _at(self, step: int) -> int:
        """Where a step's row is, made now if it is not there."""
        if step - 1 not in self._steps:
            first = (step - 1) // _AT_ONCE * _AT_ONCE
            self._steps = range(first, min(first + _AT_ONCE, self._total))
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
    """The places of a moment's pieces in host memory, made the first time."""
    places = []
    for piece in moment.shards:
        assert piece.storage is not None
        if piece.storage.on_host is None:
            piece.storage.on_host = np.zeros(piece.columns, piece.dtype)
        places.append(piece.storage.on_host)
    return places


class Optimizer:
    """Clips and applies the gradient that a model has summed up."""

    def __init__(self, model: AdapterModel, optim: OptimConfig, total_steps: int) -> None:
        """Allocates the moments, zeroed, and compiles the update."""
        self._model = model
        self._trained = model.active_adapter
        self.schedule = Schedule(optim, total_steps)  # of its learning rates
        info = Storage("step info", "inputs", 4 * STEP_NUMBERS)
        self._info = vector("step_info", STEP_NUMBERS, "float32", info)
        graph, adapter = model.layout.new_graph(), model.adapter
        adapter.keep_moments(optim.name)
        zeros = adapter.moments.zeros()
        passing: Sequence[MomentsPart] = ()
        if model.layout.offload.host_moments:
            passing = moments_in_parts(
                [_on_host(each) for each in adapter.moments.vectors],
                adapter.moments.blocks,
            )
        trace_update(graph, adapter, model.stats, self._info, optim, passing)
        self._program = model.programs.from_graph(graph)
        for moment in adapter.moments.vectors:
            model.write_flat(moment, zeros)

    def step(self, step: int) -> None:
        """Queues the update of step 1, 2, …; does not wait. The gradient is zeroed by it."""
        if self._model.active_adapter != self._trained:
            raise ConfigError(
                f"adapter {self._model.active_adapter!r} is active, but {self._trained!r} is in "
                f"training: set_adapter({self._trained!r}) before the next step"
            )
        self._model.write_flat(self._info, self.schedule.row(step))
        self._program.run()
        self._model.parameters_changed = True
