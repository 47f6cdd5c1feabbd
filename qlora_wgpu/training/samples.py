"""Texts that a model continues while it is trained, and how prompts are written for it.

``samples.jsonl`` has a row for each: ``step, prompt, expected, text``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT
from qlora_wgpu.config import Config
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.config.values import AT_EVALUATIONS
from qlora_wgpu.data import PromptFormat, save_prompt_files
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.files import exists
from qlora_wgpu.training.evaluation import Evaluator, steps_between
from qlora_wgpu.training.observers import Observer
from qlora_wgpu.training.result import TrainResult, Written
from qlora_wgpu.training.run_folder import RunLog

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run


def keep_prompt(
    settings: Config, source: Path, prompt: PromptFormat, result: TrainResult, observer: Observer
) -> None:
    """Writes the tokenizer, the chat template and the prompts' format beside a run's adapter.

    Those of a run that had been finished before stay as they are. What cannot be written is told,
    and does not end the run.
    """
    folder = result.adapter_dir
    if result.was_finished and exists(folder / PROMPT_FORMAT):
        return
    try:
        save_prompt(settings, source, prompt, folder)
    except QLoRAError as err:
        observer.warning(f"the adapter is there, but how its prompts are written is not: {err}")


def save_prompt(settings: Config, source: Path, prompt: PromptFormat, folder: Path) -> None:
    """Writes those files into a folder."""
    name = settings.data.chat_template if prompt.kind == "chat" else prompt.kind
    save_prompt_files(folder, source, prompt, name if name in BUILT_IN_CHAT_TEMPLATES else None)


class SampleGenerator(Protocol):
    """Prompts, and who continues them."""

    @property
    def first(self) -> Sequence[Written]:
        """What was written before the first step."""

    def write(self) -> Iterator[Written]:
        """Continues one prompt after another with the model as it is."""


class SampleLogger:
    """Writes a run's texts between two steps."""

    def __init__(self, run: Run, texts: SampleGenerator | None, evaluator: Evaluator) -> None:
        """Without texts it never writes."""
        self._run = run
        self._texts = texts
        self._evaluator = evaluator
        every = run.config.eval.sample_steps
        self._every: int | None = None
        if every != AT_EVALUATIONS:
            self._every = steps_between(float(every), run.total_steps)

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

    def write(self, step: int) -> None:
        """Writes all of them, or none where somebody stops the run."""
        assert self._texts is not None
        run, written = self._run, list[Written]()
        run.events.activity("writing texts")
        with run.throughput.paused():
            for text in self._texts.write():
                written.append(text)
                if run.stop.requested:
                    break
        run.events.activity("")
        if not run.stop.requested:
            log_texts(run.folder.texts, step, written)
            run.events.written(step, written)


def log_texts(log: RunLog, step: int, texts: Sequence[Written]) -> None:
    """Appends texts to ``samples.jsonl``."""
    for text in texts:
        log.append({"step": step, **asdict(text)})
