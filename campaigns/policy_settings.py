"""Settings of GRPO and RLOO, groups, rewards and batches drawn at random, against TRL's own loops.

usage: python -m campaigns.policy_settings [--count TRIALS] [--seed N] [--seconds S] [--first N]

Needs torch, transformers, peft and trl. A trial draws completions with their rewards and trains on
them for three steps twice: here, and by TRL's trainer in float64, which gets the completions
instead of sampling them. Losses, logged metrics, gradients and the last adapter must agree.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import logging

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE / "tests" / "references"), str(HERE / "tests")]

import record_policy  # noqa: E402
from record import adapted, peft_name  # noqa: E402
from references.policy_cases import (  # noqa: E402
    ADAM_EPSILON,
    END,
    PAD,
    RATES,
    STEPS,
    Given,
)
from references.projections import distance, whole_projections  # noqa: E402
from support.policy_steps import Step, config_of, train  # noqa: E402
from support.recorded_models import recorded_base, start  # noqa: E402

from campaigns.support import Tally, campaign  # noqa: E402
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig  # noqa: E402

NAMES = ("first", "second", "third", "fourth")
REWARDS = ("normal", "normal", "binary", "one of many", "constant", "tenths", "large", "small",
           "mostly none", "none")  # fmt: skip
NOISE = 1e-9
"""Advantages below it are rounding, whose sign says what TRL counts as clipped."""


def shape_of(rng: random.Random) -> dict[str, int]:
    """Sizes of groups, micro-batches and steps, which fill each other."""
    while True:
        shape = {
            "group": rng.choice((2, 3, 4, 5, 8)), "batch": rng.choice((1, 2, 3, 4, 6, 8)),
            "accumulation": rng.choice((1, 1, 2, 3, 4)),
            "max_completion_length": rng.choice((3, 8, 14)),
        }  # fmt: skip
        if shape["batch"] * shape["accumulation"] % shape["group"] == 0:
            return shape


def settings_of(rng: random.Random, shape: dict[str, int], weights: list[float]) -> dict[str, Any]:
    """Settings by the names of TRL."""
    made: dict[str, Any] = {
        "objective": rng.choice(("grpo", "grpo", "grpo", "rloo")),
        "num_iterations": rng.choice((1, 1, 2, 3)),
        "steps_per_generation": shape["accumulation"] * rng.choice((1, 1, 2, 3)),
        "temperature": rng.choice((1.0, 1.0, 0.5, 1.7)),
        "mask_truncated_completions": rng.random() < 0.4,
        "epsilon": rng.choice((0.2, 0.2, 0.0, 0.01, 0.9, 1.5)),
        "epsilon_high": rng.choice((None, None, 0.0, 0.02, 0.3, 2.0, 5.0)),
        "beta": rng.choice((0.0, 0.0, 0.04, 0.3)),
        "reward_weights": tuple(weights),
    }
    if made["objective"] == "rloo":
        clipped = rng.choice((None, None, (-0.5, 0.75), (0.0, 100.0)))
        return made | {"normalize_advantages": rng.random() < 0.5, "reward_clip_range": clipped}
    losses = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
    return made | {
        "loss_type": rng.choice(losses),
        "scale_rewards": rng.choice(("group", "batch", "none")),
        "importance_sampling_level": rng.choice(("token", "token", "sequence")),
        "top_entropy_quantile": rng.choice((1.0, 1.0, 0.83, 0.31, 0.0)),
        "delta": rng.choice((None, None, 0.7, 1.01, 1.4, 4.0)),
        "multi_objective_aggregation": rng.choice(("sum_then_normalize", "normalize_then_sum")),
        "use_bias_correction_kl": rng.random() < 0.5,
        "sapo_temperature_pos": rng.choice((1.0, 0.25, 3.0)),
        "sapo_temperature_neg": rng.choice((1.05, 0.5, 2.0)),
    }


def rewards_of(rng: random.Random, shape: tuple[int, int], kind: str) -> np.ndarray:
    """(prompts, group) rewards of a function, each a float32 number or None."""
    numbers = np.random.default_rng(rng.randrange(1 << 32))
    made = numbers.standard_normal(shape)
    if kind == "binary":
        made = (made > 0.6).astype(np.float64)
    elif kind == "one of many":
        made = (made == made.max(axis=1, keepdims=True)).astype(np.float64)
    elif kind in ("constant", "none"):
        made = np.full(shape, 0.1)
    elif kind == "tenths":
        made = numbers.integers(0, 4, shape) / 10
    made = made * {"large": 3e4, "small": 1e-3}.get(kind, 1.0)
    table = np.float32(made).astype(object)
    missing = {"mostly none": 0.8, "none": 1.0}.get(kind, rng.choice((0.0, 0.0, 0.1)))
    table[numbers.random(shape) < missing] = None
    for index in np.argwhere(table != None):  # noqa: E711
        table[tuple(index)] = float(table[tuple(index)])
    return table


def given_for(rng: random.Random, shape: dict[str, int], count: int) -> tuple[Given, list[str]]:
    """Completions of eight prompts or more, and the kinds of their rewards."""
    prompts: list[list[int]] = []
    while len(prompts) < shape["batch"] * 12 * shape["accumulation"] // shape["group"]:
        ids = [rng.randrange(PAD) for _ in range(rng.choice((1, 2, 3, 7, 12)))]
        prompts += [ids] if ids not in prompts else []
    ended = rng.choice((0.1, 0.7, 1.0))
    completions = []
    for _ in prompts:
        own = []
        for _ in range(shape["group"]):
            # If all had one token, TRL would take what is of tokens for what is of sequences.
            length = rng.randint(0 if own else 1, shape["max_completion_length"] - 1)
            ids = [rng.randrange(PAD) for _ in range(length)]
            own.append([*ids, END] if rng.random() < ended else [*ids, rng.randrange(PAD)])
        completions.append(own)
    kinds = [rng.choice(REWARDS) for _ in range(count)]
    size = len(prompts), shape["group"]
    table = np.stack([rewards_of(rng, size, kind) for kind in kinds], axis=-1)
    return Given(prompts, completions, table, NAMES, END), kinds


class Trials:
    """Trials on the recorded Llama, opened once."""

    def __init__(self, folder: Path) -> None:
        base = np.load(HERE / "tests/references/llama.npz")
        modules = sorted({n.split(".")[-3] for n in base.files if n.startswith("grad:")})
        lora = LoraConfig(r=5, lora_alpha=10, lora_dropout=0.0, target_modules=modules)
        place, recorded = recorded_base(HERE / "tests/references/llama.npz", folder)
        self.model = QLoRAModel.from_pretrained(place, lora, QuantConfig(scheme="none"), "float32")
        self.adapter = start(recorded)

    def judge(self, seed: int, tally: Tally) -> None:
        """One trial."""
        rng = random.Random(seed)
        shape = shape_of(rng)
        count = rng.choice((1, 1, 2, 4))
        weights = [rng.choice((1.0, 1.0, 0.5, -0.25, 0.0, 2.0)) for _ in range(count)]
        settings = settings_of(rng, shape, weights)
        given, kinds = given_for(rng, shape, count)
        how = f"--seed 0 --first {seed}: {settings} {shape} {kinds}"
        theirs, expected = by_trl(settings, given, shape, torch.float64)
        config = config_of(settings, shape, RATES[settings["objective"]], ADAM_EPSILON)
        advantages: list[np.ndarray] = []
        ours, last = train(self.model, self.adapter, config, given, STEPS, advantages.append)
        sizes = np.abs(np.concatenate(advantages))
        noisy = bool(((sizes > 0) & (sizes < NOISE * sizes.max(initial=0))).any())
        scale = max(1.0, float(sizes.max(initial=0)))
        norm = float(np.linalg.norm([np.linalg.norm(a) for a in last.values()]))
        apart = distance(whole_projections(last), whole_projections(expected))
        found, most = differences(ours, theirs, scale, noisy=noisy), 1e-4 * norm
        if found or not apart <= most:  # by more than four times what PyTorch's float32 is off?
            tally.add("compared with PyTorch's float32")
            like, other = by_trl(settings, given, shape, torch.float32)
            found = differences(ours, theirs, scale, like, noisy=noisy)
            most += 4 * distance(whole_projections(other), whole_projections(expected))
        if not apart <= most:
            found.append(f"the adapter by {apart / norm:.1e}")
        kind = f"{settings['objective']} {settings.get('loss_type', '')}".strip()
        if found:
            tally.fail(f"differs: {kind}", f"{'; '.join(found)}; {how}")
        else:
            tally.add(kind)


Theirs = tuple[list[float], list[Any], list[Any]]  # by step: losses, gradients and metrics


def by_trl(
    settings: dict[str, Any], given: Given, shape: dict[str, int], dtype: torch.dtype
) -> tuple[Theirs, dict[str, np.ndarray]]:
    """What TRL's trainer computes with a model of a type, and the last adapter."""
    model, trained = adapted("llama", dtype)
    made = record_policy.train(model, trained, settings, given, shape)
    return made, {peft_name(n): p.detach().numpy() for n, p in trained.items()}


def differences(
    ours: list[Step], theirs: Theirs, scale: float, like: Theirs | None = None, *, noisy: bool
) -> list[str]:
    """What differs by more than rounding, or than four times what ``like`` differs.

    ``scale`` is the size of the losses' terms.
    """
    found = []
    for index, (step, loss, gradient, metrics) in enumerate(zip(ours, *theirs, strict=True)):
        told = record_policy.told(gradient)
        norm = float(np.linalg.norm([np.linalg.norm(array) for array in gradient.values()]))
        bound, most = 3e-5 * norm + 1e-5 * scale, 1e-5 * max(abs(loss), scale)
        others: dict[str, float] = {}
        if like is not None:
            bound = max(bound, 4 * distance(record_policy.told(like[1][index]), told))
            most = max(most, 4 * abs(like[0][index] - loss))
            others = like[2][index]
        if not abs(step.loss - loss) <= most:
            found.append(f"loss {index}: {step.loss} for {loss}")
        if not (apart := distance(whole_projections(step.gradient), told)) <= bound:
            found.append(f"gradient {index} by {apart:.1e} of {norm:.1e}")
        for name, value in metrics.items():
            if value is None or (noisy and "clip_" in name):
                continue
            own, off = step.metrics.get(name, np.nan), 4 * abs((others.get(name) or value) - value)
            if not np.isclose(own, value, 2e-5, max(2e-6, off), equal_nan=True):
                found.append(f"{name} {index}: {own} for {value}")
    return found


def run(count: int, seed: int, tally: Tally) -> None:
    """So many trials."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for number in range(tally.first, tally.first + count):
            if tally.over:
                break
            trials.judge(1000 * seed + number, tally)


if __name__ == "__main__":
    campaign("settings of GRPO and RLOO", run, 20)
