"""The held-out loss of a base model, and with an adapter; answers to held-out rows, too."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import explicit_in
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.errors import ConfigError, DataError, option
from qlora_wgpu.files import is_dir
from qlora_wgpu.generation import QLoRAModel, continuation
from qlora_wgpu.generation.generate import Prompt, complete
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.runs.data import data_path, warn_of_cache
from qlora_wgpu.runs.opening import (
    OpenedModel,
    load_adapted,
    opened_as_trained,
    tell_differences,
)
from qlora_wgpu.runs.resolve import base_in, tokenizer_for
from qlora_wgpu.runs.settings import AnyConfig, as_config, named_init_from
from qlora_wgpu.runs.workload import CombinedWorkload, GenerationWorkload, LossWorkload, Workload
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.data import DataReader, check_ids, warn_of_other_split
from qlora_wgpu.training.evaluation import answer_sums, held_out_loss
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.observers import Unwatched
from qlora_wgpu.training.preferences import PreferenceData, preference_of
from qlora_wgpu.training.references import ReferenceModel
from qlora_wgpu.training.step_log import answer_metrics

# ---- an evaluation -------------------------------------------------------------------------------

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
class GenerationEval:
    """How held-out rows are answered: with the likeliest tokens."""

    max_new_tokens: int = 256  # most tokens of an answer
    batch: int = 8  # how many are computed at a time


@dataclass(frozen=True)
class Prediction:
    """A row's first answer."""

    prompt: str  # the text before it
    reference: str  # the data's answer
    prediction: str  # the model's

    @property
    def exact_match(self) -> bool:
        """Whether they are the same but for white space around them."""
        return self.prediction.strip() == self.reference.strip()


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
    settings, observer = as_config(config, overrides), observer or Unwatched()
    try:
        path = data or data_path(settings, held_out=True)
    except ConfigError as err:
        raise ConfigError(f"{err}; or measure on other data with {option('data', ...)}") from err
    written = RunPaths(settings.output.dir).adapter
    adapter = adapter or (str(written) if is_dir(written) else None)
    named, explicit = settings, explicit_in(settings, overrides)
    settings = opened_as_trained(named, adapter, observer, explicit)
    if adapter is not None:
        tell_differences(named, settings, adapter, observer)
    preference, beside = preference_of(settings.train), adapter
    if adapter is None and preference is not None and preference.has_reference:
        beside = settings.lora.init_from  # the reference of a run which has not begun
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
    parts: list[Workload] = [LossWorkload.of(settings, dataset)]
    if generate is not None:
        longest = max(len(question.ids) for question in asked)
        count = min(generate.batch, len(asked))
        parts.append(
            GenerationWorkload.of(source.pretrained, longest, generate.max_new_tokens, count)
        )
    model = load_adapted(source, beside, settings, observer, CombinedWorkload(parts))
    over_answers = None
    if preference is not None:
        over_answers = preference_evaluator(model, dataset, settings, preference, observer)

    def measured(what: str) -> tuple[HeldOutLoss, Sequence[Prediction]]:
        def progress(done: int, rows: int) -> None:
            observer.activity(f"measuring {what}: {done:,} of {rows:,} rows")

        if over_answers is not None:
            return over_answers(progress), ()
        size, longest = settings.train.per_device_train_batch_size, settings.data.max_seq_length
        total, count, correct = held_out_loss(model, dataset, size, longest, progress)
        loss = HeldOutLoss(total / count, count, correct / count)
        if generate is None:
            return loss, ()
        return loss, _answered(model, tokenizer, asked, generate, observer, what)

    with model.adapter_off():
        base, of_base = measured("the base")
    adapted, of_adapter = measured("the adapter") if adapter is not None else (None, ())
    observer.activity("")
    return Evaluation(path, adapter, base, adapted, of_base, of_adapter)


# ---- answers to held-out rows --------------------------------------------------------------------


@dataclass(frozen=True)
class EvalPrompt:
    """The beginning of a row, up to its first answer, and that answer's tokens."""

    ids: list[int]
    answer: list[int]


def questions(dataset: Dataset) -> list[EvalPrompt]:
    """The rows that have something before what is learnt."""
    found = []
    for number in range(len(dataset)):
        example = dataset[number]
        learnt = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
        if not learnt or learnt[0] < 2:
            continue
        later = set(range(learnt[0], len(example))) - set(learnt)
        end = min(later, default=None)
        ids = [int(i) for i in example.input_ids]
        found.append(EvalPrompt(ids[: learnt[0]], ids[learnt[0] : end]))
    if not found:
        raise DataError(
            "no held-out row has a prompt before what is learnt, as texts have none: leave "
            f"{option('generate', ...)} out, or give rows of messages, or of prompt and completion"
        )
    return found


def _answered(
    model: QLoRAModel, tokenizer: Tokenizer, asked: list[EvalPrompt], how: GenerationEval,
    observer: Observer, what: str,
) -> list[Prediction]:  # fmt: skip
    """The model's answers to ``questions``."""
    ends = {question.answer[-1] for question in asked}
    special = {token for token in ends if not tokenizer.decode([token])}
    stops = tokenizer.eos_token_ids | special  # of the template's turns, too
    prompts = [Prompt(question.ids, stops) for question in asked]
    made = complete(
        model, tokenizer, prompts, max_new_tokens=how.max_new_tokens, batch=how.batch,
        max_length=model.max_length,
    )  # fmt: skip
    found = []
    for number, (question, each) in enumerate(zip(asked, made, strict=True), 1):
        reference = continuation(tokenizer, (), [t for t in question.answer if t not in stops])
        found.append(Prediction(tokenizer.decode(question.ids), reference, each.text))
        observer.activity(f"answers of {what}: {number:,} of {len(asked):,} rows")
    return found


# ---- objectives over answers ---------------------------------------------------------------------


def preference_evaluator(
    model: QLoRAModel, dataset: Dataset, settings: Config, preference: Preference,
    observer: Observer,
) -> Callable[[Callable[[int, int], None]], HeldOutLoss]:  # fmt: skip
    """Asks the reference that a run had; measures the model against it as it is at each call."""
    computing, rows = LocalExecutor(model), settings.rows_at_once
    model.options = training_options(settings.train)
    longest = max(settings.data.max_seq_length, dataset.longest)
    begun_from = settings.lora.init_from if preference.has_reference else None
    with model.adapter_off() if begun_from is None else _adapter(model, begun_from):
        given = model, computing, dataset, preference, rows, longest
        references = ReferenceModel(*given).logps(
            keep=settings.data.cache, progress=observer.activity
        )
    answers = PreferenceData(dataset, preference, references, longest)

    def measured(progress: Callable[[int, int], None]) -> HeldOutLoss:
        loss, count, *sums = answer_sums(model, computing, answers, dataset, rows, progress)
        metrics = answer_metrics(settings.train, sums)
        return HeldOutLoss(loss / count, int(count), None, metrics)

    return measured


@contextmanager
def _adapter(model: QLoRAModel, folder: str) -> Iterator[None]:
    """While it is entered, the model computes with the adapter in a folder."""
    if model.adapter.trained_rows or model.adapter.trained_whole:
        with _in_its_place(model, folder):
            yield
        return
    own, name = model.active_adapter, "reference"
    with named_init_from():
        model.load_adapter(folder, name)
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(own)
        model.delete_adapter(name)


@contextmanager
def _in_its_place(model: QLoRAModel, folder: str) -> Iterator[None]:
    """The same where the model's own adapter, of one shape with it, suffers none beside it."""
    with model.device.in_turn, model.biases.off():
        before, kept = model.parameters_changed, model.read_flat(model.adapter.parameters).copy()
        with named_init_from():
            AdapterModel.load_adapter(model, folder)  # the model stays that of its own folder
        try:
            yield
        finally:
            model.write_parameters(kept)
            model.parameters_changed = before
