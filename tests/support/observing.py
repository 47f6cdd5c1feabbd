"""Runs that an ``Observer`` watches: the engine's events as objects, where callbacks get rows."""

from __future__ import annotations

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


def observed(observer: Observer | None) -> list[TrainerCallback]:
    """The callbacks of a run that an observer watches, if there is one."""
    return [] if observer is None else [Observed(observer)]
