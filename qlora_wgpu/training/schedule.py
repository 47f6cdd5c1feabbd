"""The table of what changes from step to step, made before training: rates, bias corrections."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import OptimConfig


def warmup_steps(optim: OptimConfig, total: int) -> int:
    """Steps of linear warm-up from zero."""
    if optim.lr_scheduler_type == "constant":
        return 0
    return optim.warmup_steps or math.ceil(total * optim.warmup_ratio)


def learning_rates(optim: OptimConfig, total: int) -> npt.NDArray[np.float64]:
    """The learning rate of each step, as Hugging Face's schedules of the same names give it.

    Args:
        optim: Kind of schedule, peak rate and warm-up.
        total: Steps of the run.

    Returns:
        (total) float64. With warm-up the first is 0, as there.
    """
    warmup = warmup_steps(optim, total)
    step = np.arange(total, dtype=np.float64)
    share = np.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
    if optim.lr_scheduler_type == "linear":
        after = 1.0 - share
    elif optim.lr_scheduler_type == "cosine":
        after = 0.5 * (1.0 + np.cos(np.pi * share))
    else:
        after = np.ones(total)
    factor = np.where(step < warmup, step / max(warmup, 1), after)
    return optim.learning_rate * factor


def step_table(optim: OptimConfig, total: int) -> npt.NDArray[np.float32]:
    """The values that AdamW's kernel reads at a step: rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), rate of B.

    Returns:
        (total, 4) float32; bias corrections are of t = 1, 2, …
    """
    t = np.arange(1, total + 1, dtype=np.float64)
    table = np.zeros((total, 4))
    table[:, 0] = learning_rates(optim, total)
    table[:, 1] = 1.0 - optim.adam_beta1**t
    table[:, 2] = np.sqrt(1.0 - optim.adam_beta2**t)
    table[:, 3] = optim.loraplus_lr_ratio * table[:, 0]
    return table.astype(np.float32)
