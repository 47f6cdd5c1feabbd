"""Training a model's adapter from Python, on any rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT, copy_prompt_files
from qlora_wgpu.config import Config
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.data import Dataset, PromptFormat, Tokenizer
from qlora_wgpu.data.row_source import materialize
from qlora_wgpu.errors import ConfigError, TrainingError, brief
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.files import exists, is_there
from qlora_wgpu.images.placeholders import image_files
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.callbacks import (
    Step,
    TrainerCallback,
    check_callbacks,
    subscribe_callbacks,
)
from qlora_wgpu.training.data import DataReader, Rows, is_text
from qlora_wgpu.training.finish import keep_prompt
from qlora_wgpu.training.images import encoded_images, images_of
from qlora_wgpu.training.observers import Events, TrainResult
from qlora_wgpu.training.policies import Rollouts
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.scoring import with_labels
from qlora_wgpu.training.start import refuse_both


class Trainer:
    """The public ``Trainer`` without rewards: it trains on rows that are given."""

    def __repr__(self) -> str:
        return f"Trainer({self.model!r}, output.dir={self.config.output.dir!r})"

    def __init__(
        self,
        model: AdapterModel,
        config: Config,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        """Checks the arguments, which ``qlora_wgpu.Trainer`` describes."""
        check_callbacks(callbacks)
        for given, kind, named in (
            (model, AdapterModel, "an open model, such as QLoRAModel.from_pretrained(...)"),
            (config, Config, "a Config, such as load_config('run.yaml')"),
        ):
            if not isinstance(given, kind):
                raise ConfigError(f"a Trainer requires {named}, got {brief(given)}")
        self.model = model
        self.config = config
        self._events = Events.of(None)
        subscribe_callbacks(self._events, callbacks)
        self._overwrite, self._resume = overwrite, resume
        self._callbacks = tuple(callbacks)
        self._result: TrainResult | None = None

    @property
    def result(self) -> TrainResult:
        """The result of the last run that has ended.

        Raises:
            TrainingError: If no run has ended.
        """
        if self._result is None:
            raise TrainingError("there is no result: the run has not ended")
        return self._result

    def train(
        self,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        *,
        overwrite: bool | None = None,
        resume: bool | None = None,
    ) -> TrainResult:
        """Runs all steps and writes the run's folder.

        Rows are encoded with the tokenizer and the chat template stored with the model's adapter,
        or else the base's; both are stored with the trained adapter. Ctrl-C and SIGTERM stop the
        run between two micro-batches and save its state. Failing to write a checkpoint or a log row
        is a warning and does not end the run.

        Args:
            train_dataset: A path; rows in any format of files, such as ``{"messages": [...]}`` or
                ``{"prompt": ..., "completion": ...}``; a ``Dataset``; or mappings with
                ``input_ids`` and ``labels``. By default ``data.train``, with ``data.eval`` as
                held-out data.
            eval_dataset: Held-out data, in one of these forms; by default ``data.eval_split``
                holds out rows of the training data.
            overwrite: Whether a run in ``output.dir`` may be replaced; by default the trainer's
                setting.
            resume: Whether to continue that run; by default the trainer's setting.

        Returns:
            The result of the run.

        Raises:
            DataError: If a data set has no labels or does not fit the model.
            TokenizerError: If rows have to be encoded and there is no tokenizer.
            ConfigError: If ``output.dir`` contains a run, is used by another run or cannot be
                written, if a run is resumed with other settings, data or base weights, or if there
                is no training data.
            CheckpointError: If no checkpoint of a resumed run can be loaded, or the final adapter
                cannot be written into ``output.dir``; the message says where it is instead.
            TrainingError: If a gradient or a loss is not finite or the loss diverges; earlier
                checkpoints are kept.
            CallbackError: If a callback fails; the run is saved.
            OutOfMemoryError: If the device has too little memory.
        """
        for _ in self.steps(train_dataset, eval_dataset, overwrite=overwrite, resume=resume):
            pass
        return self.result

    def steps(
        self,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        *,
        overwrite: bool | None = None,
        resume: bool | None = None,
    ) -> Iterator[Step]:
        """Trains step by step, for a loop of your own.

        A step starts when it is requested. Leaving the loop early, by ``break`` or an error, stops
        the run and saves its state. At the end, ``result`` has the run's result.

        Args:
            train_dataset: As for ``train``.
            eval_dataset: As for ``train``.
            overwrite: As for ``train``.
            resume: As for ``train``.

        Yields:
            Each step after it is finished, with the evaluation and checkpoint that were due.

        Raises:
            QLoRAError: As ``train`` does.
        """
        overwrite, resume = self._mode(overwrite, resume)
        self._events.forget_stop()
        self._result = None
        if self.config.eval.sample_prompts or self.config.eval.sample_steps:
            self._events.note("eval.sample_prompts and sample_steps are ignored by a Trainer")
        train_dataset = materialize(train_dataset)
        config = self.config
        if _has_rows(train_dataset):
            config = with_labels(config, train_dataset)
        with self._prompt_files() as source:
            tokenizer = cache(lambda: Tokenizer.from_folder(source))  # of the model's prompts
            base = self.model.layout.pretrained
            images = None
            if base.architecture.images is not None and base.folder is not None:
                path, keys = base.folder.path, base.config
                images = image_files(path, keys, lambda number: tokenizer().token(number))
            reader = DataReader(
                config, tokenizer,
                self._events, architecture=self.model.architecture,
                positions=longest_text(self.model.folder.config),
                train=train_dataset, held_out=eval_dataset, images=images,
            )  # fmt: skip
            train, held_out = reader.read()
            prompt = reader.prompt()
            features = encoded_images(
                base, images, images_of(train, held_out), self.model.device,
                self.model.compute_dtype, self.config.data.image_cache, self._events,
            )  # fmt: skip
            run = Run(
                self.model, config, self._events, train, held_out,
                overwrite=overwrite, resume=resume, callbacks=self._callbacks,
                features=features, rollouts=self._rollouts(prompt),
            )  # fmt: skip
            try:
                yield from run.steps()
            finally:
                self._result = run.result
                if (result := run.result) is not None and prompt is not None:
                    keep_prompt(config, source, prompt, result, self._events)
                    if exists(result.adapter_dir / PROMPT_FORMAT):  # for messages from now on
                        self.model.prompt_folder = result.adapter_dir

    def _rollouts(self, prompt: PromptFormat | None) -> Callable[[Run], Rollouts] | None:
        """Opens who samples the completions of GRPO; None for objectives without."""
        return None

    @contextmanager
    def _prompt_files(self) -> Iterator[Path]:
        """The folder of the model's tokenizer and chat template, for a whole run.

        If that is the adapter in ``output.dir``, which ``overwrite`` removes, it is a copy.
        """
        folder, model = self.model.prompt_folder, self.model
        own = RunPaths(Path(self.config.output.dir)).adapter
        if folder.absolute() != own.absolute():
            yield folder
            return
        with tempfile.TemporaryDirectory() as copy:
            copy_prompt_files(folder, Path(copy))
            model.prompt_folder = Path(copy)  # callbacks may generate text
            try:
                yield Path(copy)
            finally:
                if model.prompt_folder == Path(copy):  # the run has failed
                    is_kept = is_there(folder / "tokenizer.json")
                    model.prompt_folder = folder if is_kept else model.folder.text_folder

    def _mode(self, overwrite: bool | None, resume: bool | None) -> tuple[bool, bool]:
        """Whether to overwrite and to resume: a call's arguments, or else the trainer's."""
        overwrites = not resume and self._overwrite if overwrite is None else overwrite
        resumes = not overwrite and self._resume if resume is None else resume
        refuse_both(overwrite=overwrites, resume=resumes)
        return overwrites, resumes


def _has_rows(dataset: Any) -> bool:
    """Whether a data set is a path, or has rows that are not encoded yet."""
    if dataset is None or isinstance(dataset, str | PathLike):
        return True
    return not isinstance(dataset, Dataset) and is_text(dataset)
