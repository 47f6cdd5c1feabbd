"""Rows of random lengths, what of them is learnt and how they are batched, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from campaigns.drawn_models import Drawn
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example

LENGTHS = (1, 2, 3, 7, 16, 17, 33, 65, 130)
WEIGHTS = (1.0, 1.0, 0.5, 0.25, 3.0, 1e-3, 40.0)


@dataclass(frozen=True)
class Learnt:
    """A step over rows that are learnt as they are.

    Attributes:
        rows: Tokens, labels and weight of each; the weights are 1 where data has no column of them.
        config: How they are batched, and the loss.
        coefficient: That of the loss that balances experts.
    """

    rows: list[Example]
    config: Config
    coefficient: float

    @property
    def is_plain(self) -> bool:
        """Whether a trainer of TRL's computes its loss: without weights and z-loss."""
        return not self.config.data.has_weights and not self.config.train.z_loss_weight

    @property
    def dataset(self) -> Dataset:
        """What data files with these rows become."""
        return Dataset(self.rows)


def learnt(rng: random.Random, case: Drawn) -> Learnt:
    """A step over rows of a drawn model's tokens."""
    longest, weighted = rng.choice((8, 24, 65, 130)), rng.random() < 0.5
    count = rng.choice((1, 2, 3, 5, 9))
    rows = [_row(rng, case.config["vocab_size"], longest, weighted=weighted) for _ in range(count)]
    if weighted and count > 2 and rng.random() < 0.3:  # of the engine's; data leaves such rows out
        rows[0] = Example(rows[0].input_ids, rows[0].labels, 0.0)
    size = rng.choice((1, 2, 3, 8))
    train: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": -(-count // size),
        "gradient_checkpointing": rng.random() < 0.5,
        "seed": rng.randrange(100),
    }
    if rng.random() < 0.5:
        train["loss_type"] = "dft"
    else:
        train["label_smoothing_factor"] = rng.choice((0.0, 0.0, 0.1, 0.6))
        train["z_loss_weight"] = rng.choice((0.0, 0.0, 1e-4, 0.05))
    balanced = bool(case.config.get("output_router_logits"))
    if balanced and rng.random() < 0.6:
        train["router_aux_loss_coef"] = rng.choice((0.0, 0.2))
    data: dict[str, Any] = {"max_seq_length": longest, "packing": rng.random() < 0.4}
    data["group_by_length"] = rng.random() < 0.5
    if weighted:
        data["columns"] = {"weight": "w"}
    config = {"model": {"path": "unused"}, "data": {"train": "unused", **data}, "train": train}
    own = case.config.get("router_aux_loss_coef", 0.001) if balanced else 0.0
    return Learnt(rows, Config.model_validate(config), train.get("router_aux_loss_coef", own))


def _row(rng: random.Random, vocab: int, longest: int, *, weighted: bool) -> Example:
    length = min(rng.choice(LENGTHS), longest)
    ids = np.array([rng.randrange(vocab) for _ in range(length)], np.int32)
    labels, kind = ids.copy(), rng.choice(("all", "prompt", "prompt", "holes", "none"))
    if kind == "prompt":
        labels[: rng.randrange(length)] = -100
    if kind == "holes":
        labels[[rng.random() < 0.3 for _ in labels]] = -100
    if kind == "none" and rng.random() < 0.5:
        labels[:] = -100
    return Example(ids, labels, rng.choice(WEIGHTS) if weighted else 1.0)
