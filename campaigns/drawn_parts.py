"""Parts of config.json files that are drawn at random: rotations, windows, mixtures."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


def flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


def rope(rng: random.Random, rotary_dim: int, kinds: str = "") -> Config:
    """``rope_parameters`` of some kind, the rotated elements of a head so many."""
    kinds = kinds or "default default default linear llama3 yarn yarn dynamic longrope"
    kind = rng.choice(kinds.split())
    theta = rng.choice((77.0, 10_000.0, 1e6))
    original = rng.choice((16, 32, 60))
    values: Config = {"rope_type": kind, "rope_theta": theta}
    if kind in ("linear", "dynamic"):
        values["factor"] = rng.choice((1.5, 3.0))
    if kind == "llama3":
        values |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        values["original_max_position_embeddings"] = original
    if kind == "yarn":
        values |= {"factor": 4.0, "original_max_position_embeddings": original}
        if flag(rng):
            values |= {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": flag(rng)}
        if flag(rng):
            values |= {"mscale": 0.7, "mscale_all_dim": rng.choice((0.3, 0.7, 1.0))}
    if kind == "longrope":
        pairs = range(rotary_dim // 2)
        values["short_factor"] = [1.0 + 0.1 * i for i in pairs]
        values["long_factor"] = [1.0 + 0.7 * i for i in pairs]
        values["original_max_position_embeddings"] = original
    return {"rope_parameters": values}


def windowed(rng: random.Random, c: Config) -> None:
    c["sliding_window"] = rng.choice((1, 3, 7, 16, 33, 64, 300))
    c["layer_types"] = [rng.choice((SLIDING, FULL)) for _ in range(c["num_hidden_layers"])]


def experts(
    rng: random.Random, c: Config, count: str, top: str, size: str | None = "moe_intermediate_size"
) -> None:
    number = rng.choice((1, 2, 3, 5, 8, 12, 33)) if rng.random() < 0.97 else 300
    c[count], c[top] = number, rng.choice((1, min(2, number), number, rng.randint(1, number)))
    if size is not None:
        c[size] = rng.choice((12, 28, 33, 72))
    if number >= 33:
        c["num_hidden_layers"] = min(c["num_hidden_layers"], 2)
        for key in ("layer_types", "no_rope_layers"):
            if key in c:
                c[key] = c[key][-2:]
        if size is None:
            c["intermediate_size"] = 33


def groups(rng: random.Random, c: Config, count: str) -> None:
    """Groups that divide the experts, of two at least, and hold as many as are chosen."""
    number = c[count] = max(c[count], 2)  # transformers ranks a group by its two best
    groups = rng.choice([n for n in range(1, min(number // 2, 32) + 1) if number % n == 0])
    c["n_group"], c["topk_group"] = groups, rng.randint(1, groups)
    c["num_experts_per_tok"] = min(c["num_experts_per_tok"], number // groups * c["topk_group"])


def balanced(rng: random.Random, c: Config) -> None:
    if flag(rng):
        c |= {"output_router_logits": True, "router_aux_loss_coef": 0.7}


def partial(rng: random.Random, c: Config) -> None:
    share = rng.choice((0.25, 0.5, 0.75, 1.0))
    if int(share * c["head_dim"]) % 2:
        share = 1.0
    c |= rope(rng, int(share * c["head_dim"]), "default default linear yarn")
    c["rope_parameters"]["partial_rotary_factor"] = share
    c["attention_bias"] = flag(rng)
