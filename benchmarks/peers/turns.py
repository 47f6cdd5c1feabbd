"""What every participant of benchmarks/gpu_rivals.py does: waits for its turn, and times it.

A participant gets what it loads as one JSON object on stdin, then one object a turn, a ``Work``.
Every answer is one JSON object on a line of stdout; one with ``failed`` says why there is nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

WARM_UP = 2  # steps, at least
IGNORED = -100
_SHARES = (4, 3, 5, 2, 2)  # of a packed row, by the lengths of its samples

Array = npt.NDArray[np.int64]
Answer = dict[str, Any]
Turn = Callable[["Work"], Answer]


@dataclass(frozen=True)
class Work:
    """What is trained in a turn.

    Attributes:
        batch: Rows.
        seq: Tokens of a row.
        rank: Of the adapter.
        packed: Whether a row holds several samples, without attention between them.
        steps: How many are timed.
        busy: Seconds that the steps before them take at least, in which a card raises its clock.
    """

    batch: int
    seq: int
    rank: int
    packed: bool
    steps: int
    busy: float

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.seq}{' packed' if self.packed else ''}"


@dataclass(frozen=True)
class Rows:
    """A micro-batch, each array (batch, seq).

    Attributes:
        ids: Random tokens, the same for everyone.
        labels: The same; the first tokens of samples, which no other token predicts, are ignored.
        positions: From 0 in each sample.
        samples: The number of each token's sample in its row, from 1.
    """

    ids: Array
    labels: Array
    positions: Array
    samples: Array

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, row by row."""
        return [int(n) for row in self.samples for n in np.unique(row, return_counts=True)[1]]


def rows_of(work: Work, vocab: int) -> Rows:
    """The rows of a turn; packed ones have the same lengths in another order."""
    ids = np.random.default_rng(1).integers(0, vocab, (work.batch, work.seq))
    first = np.zeros((work.batch, work.seq), bool)
    first[:, 0] = True
    for row in range(work.batch) if work.packed else ():
        shares = np.roll(_SHARES, row)
        first[row, np.cumsum(shares)[:-1] * work.seq // sum(shares)] = True
    count = np.arange(work.seq)
    positions = count - np.maximum.accumulate(first * count, axis=1)
    labels = np.where(first, IGNORED, ids)
    return Rows(ids, labels, positions, np.cumsum(first, axis=1))


def timed(step: Callable[[], float], work: Work) -> Answer:
    """Seconds of a step that returns its loss, as a turn's answer."""
    begin, warm, first = time.perf_counter(), 0, 0.0
    while warm < WARM_UP or time.perf_counter() - begin < work.busy:
        loss = step()
        first = first if warm else loss
        warm += 1
    whole, seconds = time.perf_counter() - begin, []
    for _ in range(work.steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    tokens = work.batch * work.seq
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "seconds": [round(each, 6) for each in seconds],
        "warm_up_seconds": round(whole, 3),
        "first_loss": first,
        "loss": loss,
    }


def serve(load: Callable[[Answer], tuple[Answer, Turn]]) -> None:
    """Answers until stdin ends.

    Args:
        load: Gets what is asked for; returns what there is to say of it, and what does a turn.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print

    def answer(made: Callable[[], Answer]) -> bool:
        try:
            values = made()
        except BaseException as err:
            traceback.print_exc()
            values = {"failed": f"{type(err).__name__}: {err}"[:600]}
        answers.write(json.dumps(values) + "\n")
        answers.flush()
        return "failed" not in values

    turns: list[Turn] = []

    def loaded() -> Answer:
        about, turn = load(json.loads(sys.stdin.readline()))
        turns.append(turn)
        return about

    if answer(loaded):
        for line in sys.stdin:
            answer(partial(turns[0], Work(**json.loads(line))))
