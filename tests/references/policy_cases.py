"""Completions, advantages and settings of the recorded steps of GRPO and its kin."""

import numpy as np

from references.seeded import VOCAB

STEPS, RATE, MAX_COMPLETION_LENGTH = 3, 4e-4, 20
CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo-kl": {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.28, "delta": 1.5},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "gspo-plain": {
        "loss_type": "grpo",
        "sequence_level": True,
        "epsilon": 0.2,
        "beta": 0.4,
        "use_bias_correction_kl": False,
    },
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo-warm": {"loss_type": "dapo", "beta": 0.04, "temperature": 0.7},
    "luspo": {"loss_type": "luspo", "sequence_level": True, "epsilon": 0.25, "epsilon_high": 0.5},
    "gspo": {"loss_type": "grpo", "sequence_level": True, "epsilon": 0.2, "beta": 0.04},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "beta": 0.04},
    "dapo-top": {
        "loss_type": "dapo",
        "beta": 0.04,
        "temperature": 0.7,
        "top_entropy_quantile": 0.2,
    },
    "gspo-top": {"loss_type": "grpo", "sequence_level": True, "top_entropy_quantile": 0.5},
    "rloo": {"loss_type": "rloo"},
    "rloo-wide": {"loss_type": "rloo", "epsilon": 0.6, "epsilon_high": 1.5},
}


def completions():
    """Tokens of prompts and their completions, of unlike lengths."""
    random = np.random.default_rng(11)
    sizes = [(3, 9), (3, 14), (7, 1), (7, 18)]
    drawn = [[random.integers(0, VOCAB, n).tolist() for n in pair] for pair in sizes]
    return [prompt for prompt, _ in drawn], [answer for _, answer in drawn]


def advantages():
    """Of both signs, and none."""
    return np.array([1.25, -0.75, 0.5, -1.5])
