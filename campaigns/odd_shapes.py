"""Models that are odd, each computed here and by transformers and PEFT: every family.

Config.json files with a few oddities at a time (``drawn_oddities.py``), ranks beside powers of two,
rows padded at either end, of 1 to 1025 tokens. All else is as in ``model_shapes``.

``python -m campaigns.odd_shapes --count N --seed S``, with FAMILIES and TEXTS as there
"""

from __future__ import annotations

import random

import numpy as np
import torch

from campaigns.drawn_configs import Config
from campaigns.drawn_models import Drawn, drawn_lora, drawn_quant
from campaigns.drawn_oddities import odd_config
from campaigns.model_shapes import Campaign, try_all
from campaigns.support import Tally, campaign
from qlora_wgpu.families.family import find_family

LENGTHS = (1, 2, 3, 31, 32, 33, 64, 64, 127, 128, 129, 256, 513, 1025)
RANKS = (1, 2, 5, 7, 9, 12, 31, 33, 65, 127)
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def odd(rng: random.Random, model_type: str) -> Drawn:
    """A trial; its config.json may be refused."""
    config = odd_config(rng, model_type)
    architecture = find_family(config).read(config)
    lora = drawn_lora(rng, architecture)
    many = sum(".experts." in spec.name for spec in architecture.every_linear) > 40
    rank = rng.choice(RANKS[:5] if many else RANKS)
    if lora.layers_to_transform is None and rng.random() < 0.5 and not lora.use_dora:
        leaves = {spec.name.rsplit(".", 1)[-1] for spec in architecture.every_linear} - {"lm_head"}
        lora = lora.model_copy(update={"target_modules": sorted(leaves)})
    scale = rng.choice((0.3, 1, 2.5)) * (rank**0.5 if lora.use_rslora else rank)
    lora = lora.model_copy(update={"r": rank, "lora_alpha": scale})
    return Drawn(config, lora, drawn_quant(rng), *_batch(rng, config))


def _batch(rng: random.Random, config: Config) -> Batch:
    large = config["num_attention_heads"] * config["num_hidden_layers"] > 10
    lengths = LENGTHS[:-2] if large or any("experts" in key for key in config) else LENGTHS
    rows, length = rng.choice((1, 2, 3, 5)), rng.choice(lengths)
    rows = 1 if length > 256 else rows
    random_ids = np.random.default_rng(rng.randrange(2**32))
    ids = random_ids.integers(0, config["vocab_size"], (rows, length))
    mask = np.ones_like(ids)
    for row in range(rows):
        _mark(rng, mask[row], turns_by_place(config))
    if not mask.any():
        mask[0, -1] = 1
    labels = np.where(mask > 0, ids, -100)
    labels[:, 1:][(mask[:, :-1] == 0)] = -100  # what padding would have to predict
    kind = rng.choice(("some", "all", "last"))
    if kind == "some":
        labels[random_ids.random(labels.shape) < 0.2] = -100
    if kind == "last":
        labels[:, : length // 2] = -100
    return ids, mask, labels


def _mark(rng: random.Random, mask: np.ndarray, by_place: bool) -> None:
    """A row of one sample or several, with padding before, after or between them."""
    length = len(mask)
    samples = rng.choice((1, 1, 2, 4)) if length > 8 else 1
    for number, at in enumerate(sorted(rng.sample(range(1, length), samples - 1))):
        mask[at:] = number + 2
        if rng.random() < 0.3:
            mask[at - 1] = 0  # between two, unless that is all of the one before
    if length > 1 and rng.random() < 0.3:
        mask[length - rng.randint(1, length // 2) :] = 0
    if length > 1 and rng.random() < 0.3 and not by_place:
        mask[: rng.randint(1, length // 2)] = 0


def turns_by_place(config: Config) -> bool:
    """Whether a token's place in its row tells more than how far others are from it.

    There padding before a sample changes what is computed, as it does in transformers.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if config["model_type"].startswith("hunyuan"):  # it weights queries and keys that are rotated
        return True
    return kind in ("dynamic", "longrope") or "llama_4_scaling_beta" in rope


class OddCampaign(Campaign):
    """Trials of odd models, and what they showed."""

    def _drawn(self, rng: random.Random, model_type: str) -> Drawn:
        return odd(rng, model_type)


def run(count: int, seed: int, tally: Tally) -> None:
    """So many trials of every family."""
    try_all(OddCampaign(seed, tally), count, tally)


if __name__ == "__main__":
    torch.set_num_threads(1)
    campaign("odd models", run, 1)
