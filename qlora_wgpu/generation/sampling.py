"""Sampling settings of a text, and their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.limits import LOGIT_BIASES

_HOTTEST = 1_000_000  # where all tokens are as likely as one another
_BIAS = 100  # which bans a token, or takes it alone
_STRONGEST = 1_000_000  # of penalties: the inverse is the weakest, and both are far from float32's


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: Sample among this many of the likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens that together have this probability.
        seed: Seed of the sampling; None takes another each time.
        min_p: Sample among tokens that have at least this share of the likeliest's probability.
        repetition_penalty: What positive logits of tokens that the text has are divided by, and
            negative ones multiplied; 1 for none.
        logit_bias: What is added to the logits of tokens, by their ids, before all else: -100 bans
            one, 100 takes it alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuses what is out of its range."""
        check_count("top_k", self.top_k)
        if self.seed is not None:
            check_count("seed", self.seed)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= _HOTTEST:
            raise _wrong("temperature", f"a number from 0 to {_HOTTEST:,}", self.temperature)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _wrong("top_p", "a number above 0 and at most 1", self.top_p)
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise _wrong("min_p", "a number from 0 to 1", self.min_p)
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 1 / _STRONGEST <= penalty <= _STRONGEST:
            what = f"a number from 0.000001 to {_STRONGEST:,}"
            raise _wrong("repetition_penalty", what, penalty)
        _check_biases(self.logit_bias)

    def check_tokens(self, vocab: int) -> None:
        """Refuses settings of tokens that a model lacks.

        Raises:
            ConfigError: If there are any.
        """
        for token in self.logit_bias:
            if token >= vocab:
                raise ConfigError(
                    f"logit_bias has token {token}, and the model's tokens end with {vocab - 1}"
                )


def check_count(name: str, value: object) -> int:
    """A whole number from 0 on, NumPy's too, as Python's own."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise _wrong(name, "a whole number from 0 on", value)
    return int(value)


def _check_biases(biases: Mapping[int, float]) -> None:
    if not isinstance(biases, Mapping):
        raise _wrong("logit_bias", "a mapping from ids of tokens to numbers", biases)
    if len(biases) > LOGIT_BIASES:
        raise ConfigError(f"logit_bias has {len(biases):,} tokens, more than {LOGIT_BIASES:,}")
    for token, bias in biases.items():
        check_count("each token of logit_bias", token)
        if not _is_number(bias) or not -_BIAS <= bias <= _BIAS:
            raise _wrong(f"logit_bias of token {token}", f"a number from -{_BIAS} to {_BIAS}", bias)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong(name: str, what: str, value: object) -> ConfigError:
    return ConfigError(f"{name} must be {what}, got {brief(value)}")
