"""What blocks give beside gradients, summed in their order and in a device's own precision."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.cluster.blocks import Sums
from qlora_wgpu.ops.optimizers import (
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LENGTH,
    STATS_LOSS,
    STATS_METRICS,
    STATS_TOKENS,
)
from qlora_wgpu.ops.preference import METRICS

DIVERGENCE = slice(METRICS.index("divergence"), METRICS.index("divergent") + 1)
"""Where metrics have KTO's divergence, and over how many answers it is summed."""
NO_DIVERGENCE = (0.0, 0.0)


class RunningSums:
    """Sums of some blocks, with the bits that one device's would have.

    Attributes:
        stats: float32 (STATS_LENGTH), as a device has them.
        saturated: Values that kernels held at the end of their type.
    """

    def __init__(self) -> None:
        """Nothing is added yet."""
        self.stats = np.zeros(STATS_LENGTH, np.float32)
        self.saturated = 0

    def add(self, sums: Sums) -> None:
        """Adds a block's; who calls it keeps to the order of the blocks."""
        own = np.zeros(STATS_LENGTH, np.float32)
        own[STATS_LOSS], own[STATS_TOKENS] = sums.loss, sums.tokens
        own[STATS_CORRECT], own[STATS_BALANCE] = sums.correct, sums.balance
        if sums.metrics is not None:
            own[STATS_METRICS:] = sums.metrics
        self.stats += own
        self.saturated += sums.saturated

    @property
    def divergence(self) -> tuple[float, float]:
        """Of all answers so far from the reference, and over how many that is summed."""
        total, count = self.stats[STATS_METRICS:][DIVERGENCE].tolist()
        return total, count
