"""What a measurement without a gradient gives."""

from __future__ import annotations

from typing import NamedTuple


class LossSums(NamedTuple):
    """Sums over the label tokens of some batches.

    Attributes:
        loss: The loss, in nats.
        tokens: The label tokens.
        correct: Those whose logit is the largest, or as large as it.
    """

    loss: float
    tokens: int
    correct: int
