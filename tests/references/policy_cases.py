"""Completions, rewards and settings of the recorded steps of GRPO and RLOO.

``CASES`` are the whole product of ``PRODUCT``, and settings drawn so that each pair of values of
two options occurs; settings have the names of TRL and of the section ``grpo``.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from support.tiers import PAIRS, covering

from references.seeded import VOCAB

STEPS, ADAM_EPSILON, RATES = 3, 1e-2, {"grpo": 5e-3, "rloo": 5e-4}
BATCH, ACCUMULATION, GROUP, MAX_COMPLETION_LENGTH = 4, 2, 4, 16
SHAPE = {
    "batch": BATCH, "accumulation": ACCUMULATION, "group": GROUP,
    "max_completion_length": MAX_COMPLETION_LENGTH,
}  # fmt: skip
END, PAD = VOCAB - 1, VOCAB - 2
PROMPT_LENGTHS = (3, 5, 7, 3, 2, 6, 4, 3)
FUNCTIONS = ("short", "long", "rare")
PRODUCT = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"),
    "beta": (0.0, 0.04),
    "num_iterations": (1, 2),
    "scale_rewards": ("group", "batch", "none"),
}
SHARED = {
    "num_iterations": (1, 2),
    "steps_per_generation": (ACCUMULATION, 2 * ACCUMULATION),
    "temperature": (1.0, 0.7),
    "mask_truncated_completions": (False, True),
    "reward_weights": ((1.0,), (1.0, 0.5, -0.25)),
    "epsilon": (0.2, 0.02),
    "epsilon_high": (None, 0.01, 0.28, 1.1),
}
OPTIONS = {
    "grpo": {
        "loss_type": (*PRODUCT["loss_type"], "luspo"),
        "beta": PRODUCT["beta"],
        "scale_rewards": PRODUCT["scale_rewards"],
        "importance_sampling_level": ("token", "sequence"),
        "top_entropy_quantile": (1.0, 0.5, 0.2, 0.0),
        "delta": (None, 1.05, 0.99, 1.5),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "use_bias_correction_kl": (True, False),
        "sapo_temperature_pos": (1.0, 0.5),
        "sapo_temperature_neg": (1.05, 2.0),
        **SHARED,
    },
    "rloo": {
        "beta": (0.05, 0.0, 0.5),
        "normalize_advantages": (False, True),
        "reward_clip_range": (None, (-0.5, 1.25)),
        **SHARED,
    },
}


@dataclass(frozen=True)
class Given:
    """What steps train on."""

    prompts: list  # tokens of each
    completions: list  # of each prompt, the tokens of each completion
    rewards: np.ndarray  # (prompts, completions of each, functions); None for no reward
    names: tuple  # of the reward functions
    end: int  # the token that ends a completion that is not truncated


def _drawn(objective, count=600):
    """Settings that together have each pair of values of two options."""
    options = OPTIONS[objective]
    rng = np.random.default_rng(17)
    rows = [tuple(values[rng.integers(len(values))] for values in options.values())
            for _ in range(count)]  # fmt: skip
    chosen = [rows[index] for index in covering(rows, PAIRS)]
    return {
        f"{objective}-{number}": {"objective": objective, **dict(zip(options, row, strict=True))}
        for number, row in enumerate(chosen)
    }


def named(loss_type, beta, num_iterations, scale_rewards):
    """The name of a case of the product."""
    return f"{loss_type}-{beta}-{num_iterations}-{scale_rewards}"


WHOLE = {
    named(*row): {"objective": "grpo", **dict(zip(PRODUCT, row, strict=True))}
    for row in product(*PRODUCT.values())
}
DRAWN = {**_drawn("grpo"), **_drawn("rloo")}
CASES = {**WHOLE, **DRAWN}


def completions():
    """Tokens of prompts, and of the completions of each, of which some end."""
    random = np.random.default_rng(11)
    prompts = [random.integers(0, PAD, n).tolist() for n in PROMPT_LENGTHS]
    made = []
    for number in range(len(prompts)):
        sizes = random.integers(1, MAX_COMPLETION_LENGTH, GROUP)
        texts = [random.integers(0, PAD, n).tolist() for n in sizes]
        # The second prompt's all reach the maximum, so that a micro-batch may have no loss.
        ends = random.random(GROUP) < (0.0 if number == 1 else 0.7)
        made.append([[*text, END] if end else text for text, end in zip(texts, ends, strict=True)])
    return prompts, made


def rewards(settings):
    """(prompts, GROUP, functions) rewards of a case's functions, None where there is none."""
    random = np.random.default_rng(12)
    shape = len(PROMPT_LENGTHS), GROUP, len(FUNCTIONS)
    drawn = (random.integers(-40, 60, shape) / 32).astype(object)
    drawn[random.random(shape) < 0.1] = None
    drawn[4, :, 1], drawn[0, 1] = None, None
    if settings["objective"] == "grpo":  # RLOO's advantages would have the sign of rounding
        drawn[2] = 0.5
    return drawn[..., : len(settings.get("reward_weights", (1.0,)))]
