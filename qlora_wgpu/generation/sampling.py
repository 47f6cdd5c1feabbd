"""The settings of a text that is generated: what they may be, and the choice of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ConfigError, brief


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: Sample among this many of the likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens that together have this probability.
        seed: Seed of the sampling; None takes another each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        """Refuses what is out of its range.

        Raises:
            ConfigError: If a setting is.
        """
        check_count("top_k", self.top_k)
        if self.seed is not None:
            check_count("seed", self.seed)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _wrong("temperature", "a number from 0 on", self.temperature)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _wrong("top_p", "a number above 0 and at most 1", self.top_p)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(self.seed))

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token, by the logits (vocab_size) of all."""
        if self.temperature <= 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        if self.top_k > 0:
            order = order[: self.top_k]
        # The largest is taken off first: however small the temperature, nothing overflows.
        p = np.exp((logits[order].astype(np.float64) - logits.max()) / self.temperature)
        p /= p.sum()
        if self.top_p < 1.0:
            # The token that crosses the threshold is kept, so one always is.
            kept = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1
            order, p = order[:kept], p[:kept] / p[:kept].sum()
        return int(self._random.choice(order, p=p))


def check_count(name: str, value: object) -> None:
    """Refuses what is no whole number from 0 on.

    Raises:
        ConfigError: If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise _wrong(name, "a whole number from 0 on", value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong(name: str, what: str, value: object) -> ConfigError:
    return ConfigError(f"{name} must be {what}, got {brief(value)}")
