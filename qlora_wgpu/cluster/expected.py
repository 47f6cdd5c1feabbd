"""What an owner knows of an answer before it comes: one that differs is not used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from qlora_wgpu.cluster.blocks import Asked, FloatArray, Sums
from qlora_wgpu.errors import ClusterError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.steps import Samples
from qlora_wgpu.ops.preference import METRICS, Preference

_ROUNDING = 1e-3  # of a sum of weights


class WrongAnswerError(ClusterError):
    """A worker's answer is not one to what it was asked."""


@dataclass(frozen=True)
class Expected:
    """The form of a block's sums.

    Attributes:
        tokens: Its label tokens, or pairs or answers; the sum of its weights, where it has some.
        is_weighted: Whether it is such a sum, which a device adds up in another order.
        gradient: Length of its gradient; None without one.
        has_metrics: Whether there are sums of ``METRICS``.
        answers: How many log probabilities there are; None where none were asked for.
    """

    tokens: float
    is_weighted: bool = False
    gradient: int | None = None
    has_metrics: bool = False
    answers: int | None = None

    def check(self, asked: Asked, sums: Any) -> Sums:
        """The sums, where they are an answer to this block.

        Raises:
            WrongAnswerError: If they are not; says how they differ.
        """
        if not isinstance(sums, Sums):
            raise WrongAnswerError(f"it answered with {_kind(sums)} in place of a block's sums")
        if sums.nonce != asked.nonce:
            raise WrongAnswerError("it answered with the sums of another block")
        metrics = len(METRICS) if self.has_metrics else None
        for name, array, length in (
            ("gradient", sums.gradient, self.gradient),
            ("metrics", sums.metrics, metrics),
            ("log probabilities", sums.answers, self.answers),
        ):
            _check_vector(name, array, length)
        for name in ("loss", "tokens", "correct", "balance", "seconds"):
            if not isinstance(getattr(sums, name), Real):
                raise WrongAnswerError(f"its {name} is {_kind(getattr(sums, name))}, not a number")
        saturated: Any = sums.saturated
        if not isinstance(saturated, Integral) or int(saturated) < 0:
            raise WrongAnswerError(f"it counted {saturated!r} saturated values")
        apart = _ROUNDING * self.tokens if self.is_weighted else 0.0
        if not abs(sums.tokens - self.tokens) <= apart:
            raise WrongAnswerError(f"it counted {sums.tokens:g} tokens, not {self.tokens:g}")
        if not (math.isfinite(sums.seconds) and sums.seconds >= 0):
            raise WrongAnswerError(f"it computed for {sums.seconds} seconds, as it says")
        return sums


def expected(
    method: str, given: Sequence[Any], length: int, preference: Preference | None
) -> Expected:
    """What a worker's method gives for a block.

    Args:
        method: The worker's.
        given: Its arguments, without what it is asked as.
        length: Of the flat adapter.
        preference: The objective over answers, if it is one.
    """
    _, targets, mask, *more = given
    if method == "loss":
        targets = shifted_targets(np.asarray(targets, np.int64), np.asarray(mask, np.int64))
        return Expected(_labels(targets))
    if method == "answer_logps":
        return Expected(0.0, answers=int(more[0]))
    if method == "divergence":
        return Expected(0.0, has_metrics=True)
    samples = next((each for each in more if isinstance(each, Samples)), None)
    gradient = length if method == "gradient" else None
    if samples is not None and preference is not None:
        count = len(samples.references) / (2 if preference.is_paired else 1)
        return Expected(count, gradient=gradient, has_metrics=True)
    weights = more[1]
    count = _labels(targets, weights)
    return Expected(count, weights is not None, gradient, has_metrics=True)


def check_parameters(values: Any, length: int) -> FloatArray:
    """A flat adapter that a worker told.

    Raises:
        WrongAnswerError: If it is none, or not finite.
    """
    _check_vector("adapter", values, length)
    if not np.isfinite(values).all():
        raise WrongAnswerError("its adapter has values that are not finite")
    checked: FloatArray = values
    return checked


def check_text(ids: Any, most: int, vocab_size: int) -> list[int]:
    """The tokens that a worker wrote.

    Raises:
        WrongAnswerError: If they are too many, or none of the vocabulary's.
    """
    if not isinstance(ids, list) or not all(isinstance(token, Integral) for token in ids):
        raise WrongAnswerError(f"it wrote {_kind(ids)} in place of a list of tokens")
    if len(ids) > most or not all(0 <= token < vocab_size for token in ids):
        raise WrongAnswerError(f"it wrote {len(ids)} tokens of {most}, or some of no vocabulary")
    return [int(token) for token in ids]


def _check_vector(name: str, array: Any, length: int | None) -> None:
    if length is None:
        if array is not None:
            raise WrongAnswerError(f"its answer has {name}, for which nobody asked")
        return
    if type(array) is not np.ndarray:
        raise WrongAnswerError(f"its {name} is {_kind(array)}, not an array")
    if array.dtype != np.float32:
        raise WrongAnswerError(f"its {name} is of {array.dtype}, not float32")
    if array.shape != (length,):
        shape = " × ".join(map(str, array.shape))
        raise WrongAnswerError(f"its {name} has {shape or 'no'} values, not {length}")


def _labels(targets: Any, weights: Any = None) -> float:
    is_label = np.asarray(targets) != IGNORE_INDEX
    return float(is_label.sum() if weights is None else np.asarray(weights)[is_label].sum())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
