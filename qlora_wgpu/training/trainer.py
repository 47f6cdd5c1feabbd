"""Training a model's adapter as a configuration says: what comes before and after the steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, PromptFormat, bucket_length
from qlora_wgpu.errors import ConfigError, TrainingError
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.presence import exists
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.computing import Computing, OwnDevice, ThroughputMeter
from qlora_wgpu.training.data import (
    RowReader,
    Rows,
    SourceCounter,
    learnable,
    refuse_other_objectives,
)
from qlora_wgpu.training.data_warnings import require_both_kinds, tell_of_weights
from qlora_wgpu.training.divergence import first_plateau
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.finish import check_ended, finish, interrupt, result_of, revisit
from qlora_wgpu.training.loop import TrainingLoop
from qlora_wgpu.training.observers import Observer, ObserverList, Unwatched, Watched
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.preferences import training_options
from qlora_wgpu.training.references import answers_of
from qlora_wgpu.training.result import TrainResult
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.run_folder import RunIdentity, one_run_of
from qlora_wgpu.training.samples import Texts, TextWriter, keep_prompt
from qlora_wgpu.training.start import (
    Beginning,
    open_run,
    refuse_fewer_steps,
    take_aim,
    tell_of_length,
)
from qlora_wgpu.training.steering import Callback, Callbacks, Steering, Step


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
        computing: Computing | None = None,
        texts: Texts | None = None,
        on_step: Callback | None = None,
        on_evaluate: Callback | None = None,
        on_save: Callback | None = None,
    ) -> None:
        """Takes the settings of ``train``, ``optim``, ``eval``, ``log``, ``output`` and ``data``.

        Args:
            model: The model, whose adapter is trained; its own LoraConfig and QuantConfig count.
            config: The settings.
            observer: Who is told of every step; without one, what is to be known comes as a
                ``QLoRAWarning``.
            overwrite: Whether a run in ``output.dir`` may be replaced.
            resume: Whether the run in ``output.dir`` goes on from its newest whole checkpoint; one
                that has none yet, and no adapter, begins again.
            computing: Who computes micro-batches; by default the model itself, a ``QLoRAModel``.
            texts: Who continues texts in between, as ``eval.sample_steps`` asks; nobody by default.
            on_step: Called with a ``Step`` after each step; what it asks for is done at once.
            on_evaluate: Called likewise after each evaluation, the one before training included.
            on_save: Called likewise after a checkpoint or the adapter was written.

        Raises:
            ConfigError: If a callback cannot be called.
        """
        self.model = model
        self.config = config
        self._observer = Watched(observer or Unwatched())
        self._made = self._begins = Beginning(overwrite, resume)
        self._computing = computing
        self._texts = texts
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
        self._observer.forget_stop()
        self._result = None
        self._begins = self._made.asked(overwrite, resume)
        asks = self.config.eval.sample_prompts or self.config.eval.sample_steps
        if asks and self._texts is None:
            self._observer.note("eval.sample_prompts and sample_steps: a Trainer writes no texts")
        own = RowReader(self.model, self.config, self._observer).read(train_dataset, eval_dataset)
        try:
            yield from self._steps_within(own.train, own.held_out)
        finally:
            self._keep_prompt(own.prompt)

    def _keep_prompt(self, prompt: PromptFormat | None) -> None:
        """Writes how prompts are written beside an adapter that is there."""
        if self._result is not None and prompt is not None:
            folder = self.model.prompt_folder
            keep_prompt(self.config, folder, prompt, self._result, self._observer)
            if exists(self._result.adapter_dir / PROMPT_FORMAT):  # as messages are written from now
                self.model.prompt_folder = self._result.adapter_dir

    def train_within(
        self, train_dataset: Dataset, eval_dataset: Dataset | None = None
    ) -> TrainResult:
        """``train``, within a run that has begun: what its observer has asked for since, stands."""
        for _ in self._steps_within(train_dataset, eval_dataset):
            pass
        return self.result

    def _steps_within(
        self, train_dataset: Dataset, eval_dataset: Dataset | None = None
    ) -> Iterator[Step]:
        """The steps of a run, and all that comes before and after them."""
        with one_run_of(self.model, self.config.output.dir):
            yield from self._steps_alone(train_dataset, eval_dataset)

    def _steps_alone(self, train_dataset: Dataset, eval_dataset: Dataset | None) -> Iterator[Step]:
        """``_steps_within``, of a model that no other run trains."""
        size = self.model.architecture.vocab_size
        rows = learnable(train_dataset, "train_dataset", size, "nothing would be learnt")
        held_out = None
        if eval_dataset:
            held_out = learnable(eval_dataset, "eval_dataset", size, "there is no loss to measure")
        for dataset, name in ((rows, "train_dataset"), (held_out, "eval_dataset")):
            if dataset is not None:
                refuse_other_objectives(dataset, name, self.config.train.objective)
        tell_of_weights(rows, self.config.train, self._observer)
        require_both_kinds(held_out, self.config)
        plateau = first_plateau(self.config, held_out=held_out is not None)
        plan = BatchPlan.of(rows.lengths, self.config)
        longest = max(self.config.data.max_seq_length, plan.longest)
        self.model.options = training_options(
            self.config.train, weighted=self.config.data.has_weights
        )
        self.model.zero_gradient()
        throughput = ThroughputMeter()
        computing = self._computing or self._own_device(throughput)
        # The longest batch first, so that all memory is taken before training.
        computing.prepare(plan.batch_size, bucket_length(plan.longest, longest))
        optimizer = Optimizer(self.model, self.config.optim, plan.total_steps)
        given = self.model, computing, self.config, self._observer, longest
        answers, measured = answers_of(rows, *given), answers_of(held_out, *given)
        asked = None if answers is None else answers.reference_hash
        identity = RunIdentity(self.model, self.config, rows, held_out, asked)
        run = open_run(
            self.model, self.config, self._observer, identity, longest, throughput, computing,
            overwrite=self._begins.overwrite, resume=self._begins.resume,
        )  # fmt: skip
        run.state.plateau = run.state.plateau or plateau
        run.answers, run.held_out_answers = answers, measured
        try:
            yield from self._train(run, rows, held_out, plan, optimizer)
        except TrainingError:
            self._tell_of_replaced(run)
            raise
        finally:
            run.folder.close()

    def _train(
        self, run: Run, rows: Dataset, held_out: Dataset | None, plan: BatchPlan,
        optimizer: Optimizer,
    ) -> Iterator[Step]:  # fmt: skip
        """Does what is left of a run."""
        evaluator = Evaluator(run, held_out, plan.total_steps)
        steering = Steering(run, self._callbacks, evaluator, optimizer, plan.total_steps)
        run.observer = ObserverList([self._observer, steering])
        try:
            yield from self._steered(run, rows, plan, optimizer, evaluator, steering)
        finally:
            steering.let_go()

    def _steered(
        self, run: Run, rows: Dataset, plan: BatchPlan, optimizer: Optimizer,
        evaluator: Evaluator, steering: Steering,
    ) -> Iterator[Step]:  # fmt: skip
        texts = TextWriter(run, self._texts, evaluator, plan.total_steps)
        refuse_fewer_steps(run, plan.total_steps)
        is_over = run.state.step >= plan.total_steps or evaluator.has_stalled
        was_finished = run.state.finished and is_over
        interrupted, stop_signal = False, None
        if was_finished:
            revisit(run)
        else:
            run.state.finished = False
            take_aim(run)
            run.folder.note_steps(plan.total_steps)
            memory = self.model.device.memory.by_kind
            self._observer.started(plan.total_steps, run.state.step, memory)
            if run.saved_at < 0:
                texts.keep_first()
                run.state.eval_loss_before = evaluator.measure(0)
            tell_of_length(run, plan.total_steps)
            run.start_clock()
            run.sources = SourceCounter(rows, plan)
            loop = TrainingLoop(run, rows, plan, optimizer, evaluator, texts, steering)
            with suppress(GeneratorExit):  # a loop that was left: there is more to do than steps
                yield from loop.steps()
            interrupted, stop_signal = loop.is_stopped, loop.stop_signal
        steering.ends()
        run.read_clock()
        if interrupted:
            interrupt(run)
        elif not was_finished:
            finish(run, evaluator)
        self._result = result_of(
            run, interrupted=interrupted, stop_signal=stop_signal,
            was_finished=was_finished,
            stopped_early=not interrupted and run.state.step < plan.total_steps,
        )  # fmt: skip
        run.observer.finished(self._result)
        check_ended(run)

    def _own_device(self, throughput: ThroughputMeter) -> Computing:
        """The model's device, which has the base, too.

        Raises:
            ConfigError: If it has an adapter alone.
        """
        if not isinstance(self.model, QLoRAModel):
            raise ConfigError("the model has no base weights: a Trainer takes a QLoRAModel")
        return OwnDevice(self.model, throughput)

    def _tell_of_replaced(self, run: Run) -> None:
        if run.folder.replaced is not None:
            self._observer.warning(
                f"the run that was to be replaced is kept in {run.folder.replaced}"
            )
