"""Runs that an ``Observer`` watches: the engine's events as objects, where callbacks get rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qlora_wgpu.training import Observer, TrainerCallback, callbacks


class Observed(TrainerCallback):
    """Stands for an observer among a run's callbacks."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def on_event(self, event: dict[str, Any]) -> None:
        raise AssertionError("the observer itself is subscribed")


_feed = callbacks._EventFeed
callbacks._EventFeed = lambda each: each.observer if isinstance(each, Observed) else _feed(each)


def observed(*observers: Observer | None) -> list[TrainerCallback]:
    """The callbacks of a run that observers watch, if there are any."""
    return [Observed(each) for each in observers if each is not None]


def calling(**functions: Callable[..., object]) -> TrainerCallback:
    """A callback whose methods are functions, such as ``on_step_end``."""
    methods = {name: staticmethod(function) for name, function in functions.items()}
    made: TrainerCallback = type("Calls", (TrainerCallback,), methods)()
    return made
