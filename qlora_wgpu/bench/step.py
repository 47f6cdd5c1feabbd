"""Training steps of one shape on the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.bench.load import Load
from qlora_wgpu.bench.timing import Spread, clocked_submits
from qlora_wgpu.errors import TrainingError
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.adamw import STATS_LOSS
from qlora_wgpu.training.optimizer import Optimizer

_WARM_UP = 2  # steps before those that count


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps, each one micro-batch and one update.

    Attributes:
        first_step_seconds: Time of the very first step, after everything was compiled.
        step_seconds: Times of the steps that count.
        host_share: Time of packing and encoding over the whole step's, in the median; submits are
            left out, since a software GPU computes inside them.
        loss: Mean loss of the last step.
    """

    first_step_seconds: float
    step_seconds: Spread
    host_share: float
    loss: float


def time_steps(
    model: QLoRAModel,
    optimizer: Optimizer,
    batch: int,
    seq: int,
    steps: int,
    progress: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Trains on random tokens and waits for every step.

    Args:
        model: The model, whose adapter is trained.
        optimizer: The adapter's optimizer, with updates enough for ``total_steps(steps)``.
        batch: Rows of a micro-batch.
        seq: Tokens of a row; all but the first are learnt.
        steps: How many steps count.
        progress: Called after each step.

    Raises:
        TrainingError: If the loss is not finite.
    """
    ids = np.random.default_rng(1).integers(0, model.architecture.vocab_size, (batch, seq))
    checked, load = model.checked(ids, ids), Load(model.device)
    model.zero_gradient()
    model.read_stats()
    whole: list[float] = []
    host: list[float] = []
    with clocked_submits(model.device) as submits:
        for step in range(1, total_steps(steps) + 1):
            if step == 1 + _WARM_UP:
                load.raise_clock()
            submits.seconds = 0.0
            begin = time.perf_counter()
            model.accumulate(*checked)
            optimizer.step(step)
            encoded = time.perf_counter() - submits.seconds
            loss = float(model.read_stats()[STATS_LOSS]) / (batch * (seq - 1))
            whole.append(time.perf_counter() - begin)
            host.append(encoded - begin)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss of step {step} is {loss}: the weights do not train")
            model.zero_stats()
            progress()
    counted = Spread.of(whole[_WARM_UP:])
    return StepTimes(whole[0], counted, Spread.of(host[_WARM_UP:]).median / counted.median, loss)


def total_steps(steps: int) -> int:
    """Steps with those that warm up."""
    return steps + _WARM_UP
