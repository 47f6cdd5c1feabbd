"""Training a model's adapter from Python, on rows of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT
from qlora_wgpu.config import Config
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import TrainingError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.files import exists
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.callbacks import Callback, Callbacks, Step
from qlora_wgpu.training.data import DataReader, Rows
from qlora_wgpu.training.finish import keep_prompt
from qlora_wgpu.training.observers import Events, Observer, TrainResult
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.start import refuse_both


class Trainer:
    """Trains a model's adapter as a configuration says.

    It prints nothing: an ``Observer`` is told what goes on.
    """

    def __repr__(self) -> str:
        return f"Trainer({self.model!r}, output.dir={self.config.output.dir!r})"

    def __init__(
        self,
        model: AdapterModel,
        config: Config,
        observer: Observer | None = None,
        *,
        overwrite: bool = False,
        resume: bool = False,
        on_step: Callback | None = None,
        on_evaluate: Callback | None = None,
        on_save: Callback | None = None,
    ) -> None:
        """Takes the settings of ``train``, ``optim``, ``eval``, ``log``, ``output`` and ``data``.

        Args:
            model: A ``QLoRAModel``, whose adapter is trained; its LoraConfig and QuantConfig count.
            config: The settings.
            observer: Who is told of every step; without one, what is to be known comes as a
                ``QLoRAWarning``.
            overwrite: Whether a run in ``output.dir`` may be replaced.
            resume: Whether the run in ``output.dir`` goes on from its newest whole checkpoint; one
                that has none yet, and no adapter, begins again.
            on_step: Called with a ``Step`` after each step; what it asks for is done at once.
            on_evaluate: Called likewise after each evaluation, the one before training included.
            on_save: Called likewise after a checkpoint or the adapter was written.

        Raises:
            ConfigError: If a callback cannot be called.
        """
        self.model = model
        self.config = config
        self._events = Events.of(observer)
        self._overwrite, self._resume = overwrite, resume
        self._callbacks = Callbacks(on_step, on_evaluate, on_save)
        self._callbacks.check()
        self._result: TrainResult | None = None

    @property
    def result(self) -> TrainResult:
        """The figures of the run that ended last.

        Raises:
            TrainingError: If none has ended.
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

        Rows are encoded as the model's prompts are written: with the tokenizer and the chat
        template kept beside its adapter, else the base's; both are kept beside the new one, too.
        Ctrl-C and SIGTERM end it early, between two micro-batches, with its state saved. What
        cannot be written in between is warned of and does not end it.

        Args:
            train_dataset: A path; rows of any format that files have, such as
                ``{"messages": [...]}`` or ``{"prompt": ..., "completion": ...}``; a ``Dataset``; or
                mappings with ``input_ids`` and ``labels``. By default ``data.train``, and then
                ``data.eval`` is measured on.
            eval_dataset: Held-out data, in one of these forms; by default ``data.eval_split``
                holds rows of the training data out.
            overwrite: Whether a run in ``output.dir`` may be replaced; by default as the trainer
                was made.
            resume: Whether to continue that run; likewise.

        Returns:
            The run's figures.

        Raises:
            DataError: If a data set has nothing to learn or does not fit the model.
            TokenizerError: If rows are to be encoded, and there is no tokenizer.
            ConfigError: If ``output.dir`` holds a run, is another run's or cannot be written, or is
                to go on with other settings, data or base weights, or there is no training data.
            CheckpointError: If a run is to go on and none of its checkpoints can be loaded, or the
                final adapter cannot be written into ``output.dir``; says where it is instead.
            TrainingError: If a gradient or a loss is not finite or the loss diverges; checkpoints
                before it are kept.
            CallbackError: If a callback or an observer has failed; the run is saved.
            OutOfMemoryError: If the device has no room.
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
        """``train``, a step at a time: for a loop of your own.

        A step begins when it is asked for. Leaving the loop early, by ``break`` or an error, stops
        the run with its state saved. In the end ``result`` has the run's figures.

        Args:
            train_dataset: As for ``train``.
            eval_dataset: As for ``train``.
            overwrite: As for ``train``.
            resume: As for ``train``.

        Yields:
            Each step when it is done, and what was due after it.

        Raises:
            QLoRAError: As ``train`` does.
        """
        overwrite, resume = self._asked(overwrite, resume)
        self._events.forget_stop()
        self._result = None
        if self.config.eval.sample_prompts or self.config.eval.sample_steps:
            self._events.note("eval.sample_prompts and sample_steps: a Trainer writes no texts")
        reader = DataReader(  # with the tokenizer that the model's prompts are written with
            self.config, cache(lambda: Tokenizer.from_folder(self.model.prompt_folder)),
            self._events, vocabulary=self.model.architecture.vocab_size,
            positions=longest_text(self.model.folder.config),
            train=train_dataset, held_out=eval_dataset,
        )  # fmt: skip
        learnt, measured = reader.read()
        prompt = reader.prompt()
        run = Run(
            self.model, self.config, self._events, learnt, measured,
            overwrite=overwrite, resume=resume, callbacks=self._callbacks,
        )  # fmt: skip
        try:
            yield from run.steps()
        finally:
            self._result = run.result
            if (result := run.result) is not None and prompt is not None:
                source = self.model.prompt_folder
                keep_prompt(self.config, source, prompt, result, self._events)
                if exists(result.adapter_dir / PROMPT_FORMAT):  # as messages are written from now
                    self.model.prompt_folder = result.adapter_dir

    def _asked(self, overwrite: bool | None, resume: bool | None) -> tuple[bool, bool]:
        """What one call asks for; where it says None, the trainer's own, but for its opposite."""
        replaces = not resume and self._overwrite if overwrite is None else overwrite
        goes_on = not overwrite and self._resume if resume is None else resume
        refuse_both(overwrite=replaces, resume=goes_on)
        return replaces, goes_on
