"""The held-out loss of a base model, and with an adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qlora_wgpu.config import Config
from qlora_wgpu.config.as_trained import explicit_in
from qlora_wgpu.config.run_paths import RunPaths
from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.errors import ConfigError, option
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.presence import is_dir
from qlora_wgpu.runs.answer_loss import PreferenceEvaluator
from qlora_wgpu.runs.data import data_path, warn_of_cache
from qlora_wgpu.runs.exact_match import (
    EvalPrompt,
    GenerationEval,
    Prediction,
    predictions,
    questions,
)
from qlora_wgpu.runs.inference_memory import (
    CombinedWorkload,
    GenerationWorkload,
    InferenceWorkload,
    Rows,
)
from qlora_wgpu.runs.opening import (
    OpenedModel,
    load_adapted,
    opened_as_trained,
    tell_differences,
)
from qlora_wgpu.runs.resolve import base_in, tokenizer_for
from qlora_wgpu.runs.settings import AnyConfig, as_config
from qlora_wgpu.training import Observer
from qlora_wgpu.training.data import DataReader, check_ids
from qlora_wgpu.training.data_warnings import warn_of_other_split
from qlora_wgpu.training.evaluation import held_out_loss
from qlora_wgpu.training.observers import Unwatched
from qlora_wgpu.training.preferences import preference_of

_LARGEST_EXPONENT = 700.0  # of e in float64


@dataclass(frozen=True)
class HeldOutLoss:
    """A loss over some data.

    Attributes:
        loss: Mean per label token, in nats; of an objective over answers per pair or answer.
        tokens: Label tokens; pairs or answers.
        token_accuracy: Share of the tokens whose logit is the largest, or as large as it; None of
            answers.
        metrics: What an objective over answers measures beside, by TRL's names.
    """

    loss: float
    tokens: int
    token_accuracy: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(min(self.loss, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation.

    Attributes:
        data: The path of the held-out data.
        adapter_path: The adapter's folder, if there is one.
        base: The base alone.
        adapter: The base with the adapter, if there is one.
        base_predictions: The base's answers, where they were asked for.
        adapter_predictions: The same with the adapter.
    """

    data: str
    adapter_path: str | None
    base: HeldOutLoss
    adapter: HeldOutLoss | None
    base_predictions: Sequence[Prediction] = ()
    adapter_predictions: Sequence[Prediction] = ()


def evaluate(
    config: AnyConfig,
    observer: Observer | None = None,
    *,
    adapter: str | None = None,
    data: str | None = None,
    overrides: Sequence[str] = (),
    generate: GenerationEval | None = None,
) -> Evaluation:
    """Measures loss and perplexity on held-out data: the base against an adapter.

    An adapter that belongs to a run is opened as that run's config.yaml says it was trained.

    Args:
        config: A ``Config``, the path of a YAML file, or a mapping with its sections.
        observer: Who is told what goes on.
        adapter: Folder of a PEFT adapter; by default that of the run in ``output.dir``, if any.
        data: Other data than ``data.eval``.
        overrides: Texts such as ``"data.eval=other.jsonl"``, for a YAML file; they take
            precedence over the adapter's run.
        generate: If given, the rows' first answers are generated, too, and compared.

    Raises:
        ConfigError: If the configuration is wrong or names no held-out data.
        CheckpointError: If model or adapter are missing or damaged, or do not fit.
        DataError: If the data cannot be read or does not fit the model.
        DeviceError: If there is no usable GPU.
    """
    settings = as_config(config, overrides)
    observer = observer or Unwatched()
    path = data or _held_out_path(settings)
    adapter = adapter or _adapter_of(settings)
    settings = _opened(settings, adapter, overrides, observer)
    beside = adapter or _begun_from(settings)
    source = OpenedModel.open(base_in(settings), settings.model).for_adapter(beside)
    tokenizer = tokenizer_for(source, beside)
    warn_of_cache(observer)
    reader = DataReader(settings, lambda: tokenizer, observer, held_out=data)
    dataset = reader.read_one(held_out=True)
    if data is None and adapter is not None and settings.data.eval_split is not None:
        warn_of_other_split(adapter, dataset, observer)
    check_ids(path, dataset, source.architecture.vocab_size)
    if generate is not None and settings.train.objective != "sft":
        raise ConfigError(
            f"{option('generate')} compares with one right answer for each row, and rows of "
            f"train.objective: {settings.train.objective} have good and bad ones: leave it out"
        )
    asked = [] if generate is None else questions(dataset)
    reading: list[InferenceWorkload] = [Rows.of(settings, dataset)]
    if generate is not None:
        longest = max(len(question.ids) for question in asked)
        count = min(generate.batch, len(asked))
        reading.append(
            GenerationWorkload.of(source.pretrained, longest, generate.max_new_tokens, count)
        )
    model = load_adapted(source, beside, settings, observer, CombinedWorkload(reading))

    over_answers = None
    if settings.train.objective != "sft":
        over_answers = PreferenceEvaluator(model, dataset, settings, observer)

    def measured(what: str) -> tuple[HeldOutLoss, Sequence[Prediction]]:
        if over_answers is not None:
            mean, pairs, metrics = over_answers.measured(what)
            return HeldOutLoss(mean, pairs, None, metrics), ()
        loss = _measured(model, dataset, settings, observer, what)
        if generate is None:
            return loss, ()
        return loss, _answered(model, tokenizer, asked, generate, observer, what)

    with model.adapter_off():
        base, of_base = measured("the base")
    adapted, of_adapter = measured("the adapter") if adapter is not None else (None, ())
    observer.activity("")
    return Evaluation(path, adapter, base, adapted, of_base, of_adapter)


def _answered(
    model: QLoRAModel,
    tokenizer: Tokenizer,
    asked: list[EvalPrompt],
    how: GenerationEval,
    observer: Observer,
    what: str,
) -> list[Prediction]:
    def progress(done: int, rows: int) -> None:
        observer.activity(f"answers of {what}: {done:,} of {rows:,} rows")

    return predictions(model, tokenizer, asked, how, progress)


def _held_out_path(settings: Config) -> str:
    try:
        return data_path(settings, held_out=True)
    except ConfigError as err:
        raise ConfigError(f"{err}; or measure on other data with {option('data', ...)}") from err


def _opened(
    settings: Config, adapter: str | None, overrides: Sequence[str], observer: Observer
) -> Config:
    """The settings with which the adapter is opened; who named others is told."""
    opened = opened_as_trained(settings, adapter, observer, explicit_in(settings, overrides))
    if adapter is not None:
        tell_differences(settings, opened, adapter, observer)
    return opened


def _adapter_of(settings: Config) -> str | None:
    """The adapter that the run of a configuration has written, if it is there."""
    folder = RunPaths(settings.output.dir).adapter
    return str(folder) if is_dir(folder) else None


def _begun_from(settings: Config) -> str | None:
    """The adapter that is the reference of a run which has not begun, if there is one."""
    preference = preference_of(settings.train)
    has_reference = preference is not None and preference.has_reference
    return settings.lora.init_from if has_reference else None


def _measured(
    model: QLoRAModel, dataset: Dataset, settings: Config, observer: Observer, what: str
) -> HeldOutLoss:
    def progress(done: int, rows: int) -> None:
        observer.activity(f"measuring {what}: {done:,} of {rows:,} rows")

    size, longest = settings.train.per_device_train_batch_size, settings.data.max_seq_length
    total, count, correct = held_out_loss(model, dataset, size, longest, progress)
    return HeldOutLoss(total / count, count, correct / count)
