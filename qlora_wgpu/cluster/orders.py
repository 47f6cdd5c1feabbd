"""Which block goes to which worker, and what each worker has done, as a division tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """A block that is given to a worker.

    Attributes:
        ticket: A number of its own.
        step: The number of the step, of all that were begun.
        worker: The worker's name.
        block: The block's place in its step.
    """

    ticket: int
    step: int
    worker: str
    block: int


@dataclass(frozen=True)
class Work:
    """What a worker has done in a while.

    Attributes:
        tokens: Of the blocks that counted, padding included.
        timed_tokens: Of the blocks whose time is known: not of those for which it compiled.
        seconds: That it took for these.
        is_suspect: Whether it has not answered for too long.
    """

    tokens: int
    timed_tokens: int
    seconds: float
    is_suspect: bool


def in_order(name: str) -> tuple[int, int | str]:
    """The order of workers' names: numbers as numbers."""
    return (0, int(name)) if name.isdecimal() else (1, name)
