"""Sampling parameters of a request, and their ranges."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.limits import LOGIT_BIASES

_MAX_TEMPERATURE = 1_000_000  # all tokens are equally likely
_MAX_BIAS = 100  # bans or forces a token
_MAX_PENALTY = 1_000_000  # the minimum is its inverse


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: Sampling temperature; 0 is greedy.
        top_k: Number of most likely tokens to sample from; 0 for all.
        top_p: Probability of the smallest set of most likely tokens to sample from.
        seed: Random seed; None for a new one each time.
        min_p: Minimum probability of a token, relative to the most likely one.
        repetition_penalty: Divides positive logits of tokens that have occurred, and multiplies
            negative ones; 1 for none.
        logit_bias: Added to the logits of tokens, by token id, before anything else: -100 bans
            a token, 100 forces it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_count("top_k", self.top_k)
        if self.seed is not None:
            check_count("seed", self.seed)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= _MAX_TEMPERATURE:
            raise _invalid(
                "temperature", f"a number from 0 to {_MAX_TEMPERATURE:,}", self.temperature
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _invalid("top_p", "a number above 0 and at most 1", self.top_p)
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise _invalid("min_p", "a number from 0 to 1", self.min_p)
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 1 / _MAX_PENALTY <= penalty <= _MAX_PENALTY:
            what = f"a number from 0.000001 to {_MAX_PENALTY:,}"
            raise _invalid("repetition_penalty", what, penalty)
        _check_biases(self.logit_bias)

    def check_tokens(self, vocab: int) -> None:
        """Refuses biases of token ids outside the vocabulary.

        Raises:
            ConfigError: If there are any.
        """
        for token in self.logit_bias:
            if token >= vocab:
                raise ConfigError(
                    f"logit_bias contains token {token}, but the model's last token is {vocab - 1}"
                )


def check_count(name: str, value: object) -> int:
    """Converts a non-negative integer, which may be NumPy's."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise _invalid(name, "a non-negative integer", value)
    return int(value)


def check_stop_ids(ids: object) -> None:
    """Raises a ConfigError unless these are token ids, or None."""
    if ids is None:
        return
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Collection):
        raise _invalid("stop_ids", "a list of token ids", ids)
    for each in ids:
        check_count("each token of stop_ids", each)


def _check_biases(biases: Mapping[int, float]) -> None:
    if not isinstance(biases, Mapping):
        raise _invalid("logit_bias", "a mapping from token ids to numbers", biases)
    if len(biases) > LOGIT_BIASES:
        raise ConfigError(
            f"logit_bias may have at most {LOGIT_BIASES:,} tokens, got {len(biases):,}"
        )
    for token, bias in biases.items():
        check_count("each token of logit_bias", token)
        if not _is_number(bias) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise _invalid(
                f"logit_bias of token {token}", f"a number from -{_MAX_BIAS} to {_MAX_BIAS}", bias
            )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _invalid(name: str, what: str, value: object) -> ConfigError:
    return ConfigError(f"{name} must be {what}, got {brief(value)}")
