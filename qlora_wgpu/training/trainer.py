"""Training a model's adapter as a configuration says: what comes before and after the steps."""

from __future__ import annotations

from qlora_wgpu.config import Config
from qlora_wgpu.config.schema import TrainConfig
from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.errors import ConfigError, DataError, TrainingError
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.options import TrainingOptions
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.cross_entropy import Objective
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.computing import Computing, OwnDevice
from qlora_wgpu.training.ending import finish, interrupt, revisit
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.learning_rates import learning_rates
from qlora_wgpu.training.loop import TrainingLoop
from qlora_wgpu.training.mixing import SourceCounter
from qlora_wgpu.training.observer import Observer
from qlora_wgpu.training.opening import open_run
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.own_rows import RowReader
from qlora_wgpu.training.plateau import first_plateau
from qlora_wgpu.training.prompts import keep_prompt
from qlora_wgpu.training.result import TrainResult
from qlora_wgpu.training.rows import Rows, as_dataset
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.run_identity import RunIdentity
from qlora_wgpu.training.texts import Texts, TextWriter
from qlora_wgpu.training.throughput import ThroughputMeter


def training_options(settings: TrainConfig) -> TrainingOptions:
    """Options of training steps, from the ``train`` section."""
    return TrainingOptions(
        checkpointing=settings.gradient_checkpointing,
        objective=Objective(settings.label_smoothing_factor, settings.z_loss_weight),
        noise=settings.neftune_noise_alpha,
        router_aux_loss_coef=settings.router_aux_loss_coef,
    )


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
    ) -> None:
        """Takes the settings of ``train``, ``optim``, ``eval``, ``log``, ``output`` and ``data``.

        Args:
            model: The model, whose adapter is trained; its own LoraConfig and QuantConfig count.
            config: The settings.
            observer: Who is told of every step.
            overwrite: Whether a run in ``output.dir`` may be replaced.
            resume: Whether the run in ``output.dir`` goes on from its newest whole checkpoint; one
                that has none yet, and no adapter, begins again.
            computing: Who computes micro-batches; by default the model itself, a ``QLoRAModel``.
            texts: Who continues texts in between, as ``eval.sample_steps`` asks; nobody by default.
        """
        self.model = model
        self.config = config
        self._observer = observer or Observer()
        self._resume = resume
        self._overwrite = overwrite
        self._computing = computing
        self._texts = texts

    def train(
        self, train_dataset: Rows | None = None, eval_dataset: Rows | None = None
    ) -> TrainResult:
        """Runs all steps and writes the run's folder.

        Rows are encoded as the model's prompts are written: with the tokenizer and the chat
        template kept beside its adapter, else the base's; both are kept beside the new one, too.
        Ctrl-C and SIGTERM end it early, between two micro-batches, with its state saved. What
        cannot be written in between is told and does not end it.

        Args:
            train_dataset: A path; rows of any format that files have, such as
                ``{"messages": [...]}`` or ``{"prompt": ..., "completion": ...}``; a ``Dataset``; or
                mappings with ``input_ids`` and ``labels``. By default ``data.train``, and then
                ``data.eval`` is measured on.
            eval_dataset: Held-out data, in one of these forms; by default ``data.eval_split``
                holds rows of the training data out.

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
            OutOfMemoryError: If the device has no room.
        """
        self._observer.forget_stop()
        asks = self.config.eval.sample_prompts or self.config.eval.sample_steps
        if asks and self._texts is None:
            self._observer.note("eval.sample_prompts and sample_steps: a Trainer writes no texts")
        own = RowReader(self.model, self.config, self._observer).read(train_dataset, eval_dataset)
        result = self.train_within(own.train, own.held_out)
        if own.prompt is not None:
            keep_prompt(self.config, self.model.prompt_folder, own.prompt, result, self._observer)
        return result

    def train_within(
        self, train_dataset: Dataset, eval_dataset: Dataset | None = None
    ) -> TrainResult:
        """``train``, within a run that has begun: what its observer has asked for since, stands."""
        rows = self._learnable(train_dataset, "train_dataset", "nothing would be learnt")
        held_out = None
        if eval_dataset:
            held_out = self._learnable(eval_dataset, "eval_dataset", "there is no loss to measure")
        plateau = first_plateau(self.config, held_out=held_out is not None)
        plan = BatchPlan.of(rows.lengths, self.config)
        longest = max(self.config.data.max_seq_length, plan.longest)
        self.model.options = training_options(self.config.train)
        self.model.zero_gradient()
        throughput = ThroughputMeter()
        computing = self._computing or self._own_device(throughput)
        # The longest batch first, so that all memory is taken before training.
        computing.prepare(plan.batch_size, bucket_length(plan.longest, longest))
        optimizer = Optimizer(self.model, self.config.optim, plan.total_steps)
        identity = RunIdentity(self.model, self.config, rows, held_out)
        run = open_run(
            self.model, self.config, self._observer, identity, longest, throughput, computing,
            overwrite=self._overwrite, resume=self._resume,
        )  # fmt: skip
        run.state.plateau = run.state.plateau or plateau
        try:
            return self._train(run, rows, held_out, plan, optimizer)
        except TrainingError:
            self._tell_of_replaced(run)
            raise
        finally:
            run.folder.close()

    def _train(
        self, run: Run, rows: Dataset, held_out: Dataset | None, plan: BatchPlan,
        optimizer: Optimizer,
    ) -> TrainResult:  # fmt: skip
        """Does what is left of a run."""
        evaluator = Evaluator(run, held_out, plan.total_steps)
        texts = TextWriter(run, self._texts, evaluator, plan.total_steps)
        _refuse_fewer_steps(run, plan.total_steps)
        is_over = run.state.step >= plan.total_steps or evaluator.has_stalled
        was_finished = run.state.finished and is_over
        interrupted, stop_signal = False, None
        if was_finished:
            revisit(run)
        else:
            run.state.finished = False
            memory = self.model.device.memory.by_kind
            self._observer.started(plan.total_steps, run.state.step, memory)
            if run.saved_at < 0:
                texts.keep_first()
                run.state.eval_loss_before = evaluator.measure(0)
            _tell_of_new_length(run, plan.total_steps)
            run.start_clock()
            run.sources = SourceCounter(rows, plan)
            loop = TrainingLoop(run, rows, plan, optimizer, evaluator, texts)
            interrupted, stop_signal = loop.run(), loop.stop_signal
        run.read_clock()
        if interrupted:
            interrupt(run)
        elif not was_finished:
            finish(run, evaluator)
        result = _result(
            run, interrupted=interrupted, stop_signal=stop_signal,
            was_finished=was_finished,
            stopped_early=not interrupted and run.state.step < plan.total_steps,
        )  # fmt: skip
        self._observer.finished(result)
        return result

    def _own_device(self, throughput: ThroughputMeter) -> Computing:
        """The model's device, which has the base, too.

        Raises:
            ConfigError: If it has an adapter alone.
        """
        if not isinstance(self.model, QLoRAModel):
            raise ConfigError("the model has no base weights: a Trainer takes a QLoRAModel")
        return OwnDevice(self.model, throughput)

    def _learnable(self, rows: Dataset, name: str, otherwise: str) -> Dataset:
        """A data set that has labels.

        Raises:
            DataError: If it has none, is empty, or does not fit the model.
        """
        dataset = as_dataset(rows, name, self.model.architecture.vocab_size)
        if not dataset.num_label_tokens:
            raise DataError(f"{name} has no label at all: {otherwise}")
        return dataset

    def _tell_of_replaced(self, run: Run) -> None:
        if run.folder.replaced is not None:
            self._observer.warning(
                f"the run that was to be replaced is kept in {run.folder.replaced}"
            )


def _refuse_fewer_steps(run: Run, total: int) -> None:
    """Refuses to go on with a run that has more steps behind it than it is to have.

    Raises:
        ConfigError: If that is so.
    """
    if run.state.step > total:
        raise ConfigError(
            f"the run in {run.folder.path} has done {run.state.step:,} steps, more than the "
            f"{total:,} of train.num_train_epochs or train.max_steps: raise these to go on, or "
            "begin a new run in another output.dir"
        )


def _tell_of_new_length(run: Run, total: int) -> None:
    """Notes how many steps a run is to have, and tells where that was another number.

    Its learning rate is that of the new length from here on, as with Hugging Face's Trainer: what
    is done has followed the old one.
    """
    before, run.state.total_steps = run.state.total_steps, total
    if run.saved_at < 0 or before in (0, total):
        return
    kind = run.config.optim.lr_scheduler_type
    rates = learning_rates(run.config.optim, total, range(run.state.step, run.state.step + 1))
    changed = f" ({kind}, of {total:,} steps from the first)"
    if kind.startswith("constant") or run.state.plateau is not None:
        changed = ""
    rate = rates[0] if run.state.plateau is None else run.state.plateau.rate
    run.observer.note(
        f"the run has {total:,} steps now, where it had {before:,}: after step {run.state.step:,} "
        f"the learning rate goes on at {rate:.2g}{changed}"
    )


def _result(
    run: Run, *, interrupted: bool, stop_signal: int | None, was_finished: bool,
    stopped_early: bool,
) -> TrainResult:  # fmt: skip
    state = run.state
    return TrainResult(
        steps=state.step,
        train_loss=state.last_loss,
        eval_loss_before=state.eval_loss_before,
        eval_loss=state.eval_loss if state.eval_step == state.step else None,
        best_eval_loss=state.best_loss,
        best_step=state.best_step if state.best_step >= 0 else None,
        num_tokens=state.num_tokens,
        seconds=state.seconds,
        interrupted=interrupted,
        stop_reason=run.observer.stop_reason if interrupted else None,
        stop_signal=stop_signal,
        stopped_early=stopped_early,
        was_finished=was_finished,
        run_dir=run.folder.path,
        adapter_dir=run.folder.adapter,
        peak_bytes=run.model.device.memory.peak,
    )
