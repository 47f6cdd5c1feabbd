"""An observer that may fail: it is told nothing more, and the run ends saved, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qlora_wgpu.errors import CallbackError, QLoRAError
from qlora_wgpu.training.observer import EVENTS, Observer


def failure_of(what: str, err: Exception, when: str = "") -> CallbackError:
    """The sentence about something of the user's that has failed.

    Args:
        what: Its name.
        err: What it raised, which is the cause.
        when: When it was called.
    """
    kind = "" if isinstance(err, QLoRAError) else f"{type(err).__name__}: "
    said = f"{kind}{err}" if str(err) else type(err).__name__
    failure = CallbackError(f"{what} failed{when}: {said}")
    failure.__cause__ = err
    return failure


class Watched(Observer):
    """Passes events on to an observer until it raises something, which is kept.

    An event may come while a step is half noted, so that its error must not end the run there.
    """

    def __init__(self, observer: Observer) -> None:
        """Holds on to it.

        Args:
            observer: Who is told.
        """
        self._observer = observer
        self._failure: CallbackError | None = None

    @property
    def stop_reason(self) -> str | None:
        """The one that it gives."""
        return self._reason or self._observer.stop_reason

    @property
    def failure(self) -> CallbackError | None:
        """What it raised."""
        return self._failure or self._observer.failure

    def forget_stop(self) -> None:
        """A run begins, in which it has not failed yet."""
        super().forget_stop()
        self._failure = None
        self._observer.forget_stop()


def _forwarded(event: str) -> Callable[..., None]:
    def tell(self: Watched, *details: Any) -> None:
        if self._failure is not None:
            return
        try:
            getattr(self._observer, event)(*details)
        except Exception as err:
            self._failure = failure_of(f"{type(self._observer).__name__}.{event}", err)

    return tell


for _event in EVENTS:  # so that no event can be forgotten
    setattr(Watched, _event, _forwarded(_event))
