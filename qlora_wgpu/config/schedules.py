"""Schedules of the learning rate by transformers' names, and what each may be told beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.limits import LEARNING_RATES, STEPS

PLATEAU = "reduce_lr_on_plateau"
_CURVES = ("linear", "cosine", "1-sqrt")
_CYCLES = 1e6


@dataclass(frozen=True)
class _Number:
    """A number within bounds, the first of which may be left out."""

    least: float
    most: float
    is_whole: bool = False  # whether it counts something
    open_below: bool = False  # whether it must be more than the least
    open_above: bool = False  # whether it must be less than the largest

    def fault(self, value: Any) -> str:
        """What is wrong with a value, if anything is."""
        kinds = (int,) if self.is_whole else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool)
        above = good and (value > self.least if self.open_below else value >= self.least)
        if above and (value < self.most if self.open_above else value <= self.most):
            return ""
        what = "a whole number" if self.is_whole else "a number"
        first = "above" if self.open_below else "from"
        last = "and below" if self.open_above else "to"
        return f"must be {what} {first} {self.least:,g} {last} {self.most:,g}"


@dataclass(frozen=True)
class _Word:
    """One of some words."""

    words: tuple[str, ...]

    def fault(self, value: Any) -> str:
        """What is wrong with a value, if anything is."""
        return "" if value in self.words else f"must be one of {', '.join(self.words)}"


_RATE = _Number(0.0, LEARNING_RATES[1])
_SHARE = _Number(0.0, 1.0)
_COUNT = _Number(0, STEPS, is_whole=True)
_POSITIVE = _Number(1, STEPS, is_whole=True)
_WAVES = _Number(0.0, _CYCLES, open_below=True)
_LOWEST: dict[str, _Number | _Word] = {"min_lr": _RATE, "min_lr_rate": _SHARE, "num_cycles": _WAVES}

ARGUMENTS: dict[str, dict[str, _Number | _Word]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {"num_cycles": _WAVES},
    "cosine_with_restarts": {"num_cycles": _Number(1, _CYCLES, is_whole=True)},
    "cosine_with_min_lr": _LOWEST,
    "cosine_warmup_with_min_lr": {**_LOWEST, "warmup_lr_rate": _SHARE},
    "polynomial": {"lr_end": _RATE, "power": _Number(0.0, 100.0)},
    "inverse_sqrt": {"timescale": _POSITIVE},
    "warmup_stable_decay": {
        "num_decay_steps": _COUNT,
        "num_stable_steps": _COUNT,
        "warmup_type": _Word(_CURVES),
        "decay_type": _Word(_CURVES),
        "min_lr_ratio": _SHARE,
        "num_cycles": _WAVES,
    },
    PLATEAU: {
        "mode": _Word(("min", "max")),
        "factor": _Number(0.0, 1.0, open_above=True),
        "patience": _COUNT,
        "threshold": _Number(0.0, 1e9),
        "threshold_mode": _Word(("rel", "abs")),
        "cooldown": _COUNT,
        "min_lr": _RATE,
        "eps": _Number(0.0, 1.0),
    },
}
"""What ``lr_scheduler_kwargs`` may hold, by the schedule's name."""


def check_schedule(name: str, given: Mapping[str, Any], learning_rate: float) -> None:
    """Refuses arguments that a schedule does not take, or cannot do without."""
    known = ARGUMENTS[name]
    for key, value in given.items():
        if key not in known:
            has = f"takes {', '.join(known)}" if known else "takes nothing"
            raise ValueError(f"has {key!r}, but lr_scheduler_type {name} {has}")
        if fault := known[key].fault(value):
            raise ValueError(f"has {key}, which {fault}")
    if "min_lr_rate" in known and ("min_lr" in given) == ("min_lr_rate" in given):
        raise ValueError(f"must have either min_lr or min_lr_rate for lr_scheduler_type {name}")
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        raise ValueError(f"must have num_decay_steps for lr_scheduler_type {name}")
    for key in ("min_lr", "lr_end"):
        if key in known and given.get(key, 0.0) > learning_rate:
            raise ValueError(f"has {key}, which must not be above the learning_rate")
    if name == "polynomial" and given.get("lr_end", POLYNOMIAL_END) >= learning_rate:
        raise ValueError("must have an lr_end below the learning_rate")


POLYNOMIAL_END = 1e-7
"""The rate that a polynomial ends with."""
