"""Texts that a model continues while it is trained: when they are written, and where they are kept.

``samples.jsonl`` has a row for each: ``step, prompt, expected, text``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Protocol

from qlora_wgpu.config.values import AT_EVALUATIONS
from qlora_wgpu.training.evaluation import Evaluator, steps_between
from qlora_wgpu.training.result import Written
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.run_log import RunLog
from qlora_wgpu.training.stopping import StopRequest


class Texts(Protocol):
    """Prompts, and who continues them."""

    @property
    def first(self) -> Sequence[Written]:
        """What was written before the first step."""

    def write(self) -> Iterator[Written]:
        """Continues one prompt after another with the model as it is."""


class TextWriter:
    """Writes a run's texts between two steps."""

    def __init__(
        self, run: Run, texts: Texts | None, evaluator: Evaluator, total_steps: int
    ) -> None:
        """Without texts it never writes."""
        self._run = run
        self._texts = texts
        self._evaluator = evaluator
        every = run.config.eval.sample_steps
        self._every = None if every == AT_EVALUATIONS else steps_between(float(every), total_steps)

    def is_due(self, step: int) -> bool:
        """Whether texts are written after a step."""
        if self._texts is None:
            return False
        if self._every is None:
            return self._evaluator.is_due(step)
        return self._every > 0 and step % self._every == 0

    def keep_first(self) -> None:
        """Notes what was written before the first step."""
        if self._texts is not None:
            log_texts(self._run.folder.texts, 0, self._texts.first)

    def write(self, step: int, stop: StopRequest) -> None:
        """Writes all of them, or none where somebody stops the run."""
        assert self._texts is not None
        run, written = self._run, list[Written]()
        run.observer.activity("writing texts")
        with run.throughput.paused():
            for text in self._texts.write():
                written.append(text)
                if stop.requested:
                    break
        run.observer.activity("")
        if not stop.requested:
            log_texts(run.folder.texts, step, written)
            run.observer.written(step, written)


def log_texts(log: RunLog, step: int, texts: Sequence[Written]) -> None:
    """Appends texts to ``samples.jsonl``."""
    for text in texts:
        log.append({"step": step, **asdict(text)})
