"""Pairs and settings of the recorded steps of TRL's RewardTrainer."""

from itertools import product

import numpy as np

from references.score_cases import CENTER
from references.seeded import VOCAB

STEPS, RATE, ADAM_EPSILON, PAIRS = 3, 5e-3, 1e-2, 12
CASES = {
    f"{center}-{'margins' if margins else 'none'}-{batch}x{accumulation}": {
        "center": center, "margins": margins, "batch": batch, "accumulation": accumulation,
    }
    for center, margins, (batch, accumulation) in product(
        (0.0, CENTER), (False, True), ((4, 1), (2, 2))
    )
}  # fmt: skip


def pairs():
    """Tokens of the chosen and the rejected sequence of each pair, and its margin."""
    random = np.random.default_rng(23)
    sizes = random.integers(2, 20, (PAIRS, 2)).tolist()
    rows = [[random.integers(1, VOCAB, size).tolist() for size in both] for both in sizes]
    return rows, (random.integers(-4, 9, PAIRS) / 8).tolist()
