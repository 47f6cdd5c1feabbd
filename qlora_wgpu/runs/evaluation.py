"""Evaluation of a base model and an adapter: held-out loss, and answers to held-out rows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import explicit_in
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.errors import ConfigError, DataError, brief, option
from qlora_wgpu.files import is_dir
from qlora_wgpu.generation import QLoRAModel, continuation
from qlora_wgpu.generation.generate import Prompt, complete
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.ops.score import Scoring
from qlora_wgpu.runs.data import data_path, warn_of_cache
from qlora_wgpu.runs.images import ImagesOfPrompt, images_with_own_device
from qlora_wgpu.runs.opening import (
    OpenedModel,
    load_adapted,
    note_differences,
    opened_as_trained,
)
from qlora_wgpu.runs.prompts import tokenizer_for
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.reward_evaluation import evaluate_rewards
from qlora_wgpu.runs.settings import AnyConfig, as_config, named_init_from
from qlora_wgpu.runs.workload import CombinedWorkload, GenerationWorkload, LossWorkload, Workload
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.data import DataReader, check_ids, warn_of_other_split
from qlora_wgpu.training.evaluation import answer_sums, held_out_loss
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.images import BatchImages, Features, prompt_images
from qlora_wgpu.training.observers import Unwatched
from qlora_wgpu.training.preferences import PreferenceData, preference_of, scoring_of
from qlora_wgpu.training.references import ReferenceModel
from qlora_wgpu.training.scoring import ScoredData, scored_loss, with_labels
from qlora_wgpu.training.step_log import answer_metrics

# ---- an evaluation -------------------------------------------------------------------------------

_LARGEST_EXPONENT = 700.0  # of e in float64


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss over a data set.

    Attributes:
        loss: Mean per label token, in nats; per pair, answer or sequence with other objectives; of
            GRPO and RLOO the negative mean reward.
        tokens: Number of label tokens, pairs, answers, sequences or completions.
        token_accuracy: Share of the label tokens whose logit is the largest; None with other
            objectives.
        metrics: Further metrics of DPO, ORPO and KTO, GRPO and RLOO, reward models and classifiers,
            by TRL's names.
        labels: Names of a classifier's labels.
        confusion_matrix: How often a classifier predicted each label for each label: a row per true
            label; for several labels per row, such a matrix (2 by 2) for each label.
    """

    loss: float
    tokens: int
    token_accuracy: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: Sequence[str] = ()
    confusion_matrix: Sequence[Sequence[Any]] | None = None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class GenerationEval:
    """How answers to held-out rows are generated (greedily)."""

    max_new_tokens: int = 256  # maximum number of tokens of an answer
    batch: int = 8  # number of rows generated at a time


@dataclass(frozen=True)
class Prediction:
    """The first answer of a held-out row."""

    prompt: str  # the text before the answer
    reference: str  # the answer in the data
    prediction: str  # the model's answer

    @property
    def exact_match(self) -> bool:
        """Whether the answers are equal, up to surrounding white space."""
        return self.prediction.strip() == self.reference.strip()


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        data: The path of the held-out data.
        adapter_path: The adapter's folder, if there is one.
        base: The loss of the base alone; None of a reward model or classifier.
        adapter: The loss with the adapter, if there is one.
        base_predictions: The base's answers, if they were requested.
        adapter_predictions: The answers with the adapter, if they were requested.
    """

    data: str
    adapter_path: str | None
    base: HeldOutLoss | None
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
    generate: GenerationEval | bool | None = None,
    reward_funcs: Sequence[Callable[..., Any]] = (),
    allow_code: bool = False,
) -> Evaluation:
    """Measures loss and perplexity, or rewards, on held-out data, of the base and with an adapter.

    An adapter that belongs to a run is opened with the settings in that run's config.yaml.

    Args:
        config: A ``Config``, the path of a YAML file or of a run's folder, or a mapping with the
            sections of a configuration.
        observer: Gets notes, warnings and progress.
        adapter: Folder of a PEFT adapter; by default that of the run in ``output.dir``, if any.
        data: Held-out data to use instead of ``data.eval``.
        overrides: Strings such as ``"data.eval=other.jsonl"``, for a YAML file; they take
            precedence over the adapter's run.
        generate: Whether to generate the rows' first answers, too, and compare them.
        reward_funcs: Reward functions of GRPO and RLOO with TRL's signature, in addition to those
            of ``grpo.reward_funcs``.
        allow_code: Whether ``grpo.reward_funcs`` may name functions in files, which run with your
            rights.

    Raises:
        ConfigError: If the configuration is invalid or names no held-out data.
        CheckpointError: If model or adapter are missing, damaged or do not match.
        DataError: If the data cannot be read or does not fit the model.
        DeviceError: If there is no usable GPU.
        RewardError: If a reward function failed.
    """
    if observer is not None and not isinstance(observer, Observer):
        raise ConfigError(f"observer must be an Observer, got {brief(observer)}")
    if isinstance(generate, bool):
        generate = GenerationEval() if generate else None
    settings, observer = as_config(config, overrides), observer or Unwatched()
    try:
        path = data or data_path(settings, held_out=True)
    except ConfigError as err:
        raise ConfigError(f"{err}; or pass other data with {option('data', ...)}") from err
    written = RunPaths(settings.output.dir).adapter
    adapter = adapter or (str(written) if is_dir(written) else None)
    named, explicit = settings, explicit_in(settings, overrides)
    settings = opened_as_trained(named, adapter, observer, explicit)
    if adapter is not None:
        note_differences(named, settings, adapter, observer)
    preference, loaded = preference_of(settings.train), adapter
    if adapter is None and preference is not None and preference.has_reference:
        loaded = settings.lora.init_from  # the reference of a run that has not started
    source = OpenedModel.open(base_in(settings), settings.model).for_adapter(loaded)
    tokenizer = tokenizer_for(source, loaded)
    warn_of_cache(observer)
    if settings.data.train is not None or settings.data.sources is not None:
        settings = with_labels(settings)
    reader = DataReader(settings, lambda: tokenizer, observer, held_out=data, images=source.images)
    dataset = reader.read_one(held_out=True)
    if data is None and adapter is not None and settings.data.eval_split is not None:
        warn_of_other_split(adapter, dataset, observer)
    check_ids(path, dataset, source.architecture)
    if (scoring := scoring_of(settings.train)) is not None:
        check_classes(source, scoring, adapter)
    if generate is not None and settings.train.objective != "sft":
        raise ConfigError(
            f"{option('generate')} is not supported with train.objective: "
            f"{settings.train.objective}, whose rows have no single reference answer: leave it out"
        )
    if settings.train.objective in POLICY_OBJECTIVES:
        count, *found = evaluate_rewards(
            settings, source, adapter, dataset, reward_funcs, observer, allow_code=allow_code
        )
        base, adapted = (
            None if row is None else HeldOutLoss(-row["reward"], count, None, row) for row in found
        )
        return Evaluation(path, adapter, base, adapted)
    prompts = [] if generate is None else eval_prompts(dataset, source.images)
    parts: list[Workload] = [LossWorkload.of(settings, dataset)]
    if generate is not None:
        longest = max(len(prompt.ids) for prompt in prompts)
        count = min(generate.batch, len(prompts))
        more = GenerationWorkload.of(
            source.pretrained, longest, generate.max_new_tokens, count,
            images=bool(dataset.image_sources), encoded=True,
        )  # fmt: skip
        parts.append(more)
    features = images_with_own_device(settings, source, dataset.image_sources, observer)
    model = load_adapted(source, loaded, settings, observer, CombinedWorkload(parts))
    if scoring is not None:
        return Evaluation(path, adapter, None, _scored(model, dataset, settings, observer))
    inputs = None if features is None else BatchImages(features, source.architecture)
    evaluate_answers = None
    if preference is not None:
        evaluate_answers = preference_evaluator(
            model, dataset, settings, preference, observer, inputs
        )

    def measured(what: str) -> tuple[HeldOutLoss, Sequence[Prediction]]:
        def progress(done: int, rows: int) -> None:
            observer.activity(f"evaluating {what}: {done:,} of {rows:,} rows")

        if evaluate_answers is not None:
            return evaluate_answers(progress), ()
        size, longest = settings.train.per_device_train_batch_size, settings.data.max_seq_length
        total, count, correct = held_out_loss(model, dataset, size, longest, progress, inputs)
        loss = HeldOutLoss(total / count, count, correct / count)
        if generate is None:
            return loss, ()
        return loss, _predictions(
            model, tokenizer, prompts, generate, observer, what, features or {}
        )

    with model.adapter_off():
        base, of_base = measured("the base")
    adapted, of_adapter = measured("the adapter") if adapter is not None else (None, ())
    observer.activity("")
    return Evaluation(path, adapter, base, adapted, of_base, of_adapter)


# ---- answers to held-out rows --------------------------------------------------------------------


@dataclass(frozen=True)
class EvalPrompt:
    """A row up to its first answer, and that answer's tokens."""

    ids: list[int]
    answer: list[int]
    images: tuple[str, ...] = ()  # the keys of its images


def eval_prompts(dataset: Dataset, images: ImageFiles | None = None) -> list[EvalPrompt]:
    """The prompts and first answers of all rows that have a prompt."""
    found = []
    for number in range(len(dataset)):
        example = dataset[number]
        labelled = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
        if not labelled or labelled[0] < 2:
            continue
        begin = labelled[0]
        end = min(set(range(begin, len(example))) - set(labelled), default=None)
        ids = [int(i) for i in example.input_ids]
        _, shown = prompt_images(example, begin, dataset, images)
        found.append(EvalPrompt(ids[:begin], ids[begin:end], shown))
    if not found:
        raise DataError(
            "no held-out row has a prompt (plain text has none): leave "
            f"{option('generate', ...)} out, or use rows of messages, or of prompt and completion"
        )
    return found


def _predictions(
    model: QLoRAModel, tokenizer: Tokenizer, rows: list[EvalPrompt], settings: GenerationEval,
    observer: Observer, what: str, features: Features,
) -> list[Prediction]:  # fmt: skip
    ends = {row.answer[-1] for row in rows}
    special = {token for token in ends if not tokenizer.decode([token])}
    stops = tokenizer.eos_token_ids | special  # including those of the template's turns
    completions = complete(
        model, tokenizer,
        [Prompt(row.ids, stops, images=ImagesOfPrompt(features, row.images)) for row in rows],
        max_new_tokens=settings.max_new_tokens, batch=settings.batch, max_length=model.max_length,
    )  # fmt: skip
    found = []
    for number, (row, completion) in enumerate(zip(rows, completions, strict=True), 1):
        reference = continuation(tokenizer, (), [t for t in row.answer if t not in stops])
        found.append(Prediction(tokenizer.decode(row.ids), reference, completion.text))
        observer.activity(f"answers of {what}: {number:,} of {len(rows):,} rows")
    return found


# ---- reward models and classifiers ---------------------------------------------------------------


def check_classes(source: OpenedModel, scoring: Scoring, adapter: str | None) -> None:
    """Refuses a language model, and one whose head has another number of classes."""
    classes = source.architecture.classes
    name = adapter or source.pretrained.name_or_path
    if not classes:
        raise ConfigError(
            f"{name} is a language model, not a reward model or classifier: train one first, or "
            f"set its adapter with {option('adapter', ...)}"
        )
    if classes != scoring.classes:
        raise ConfigError(
            f"{name} was trained with {classes} labels, but train.objective: {scoring.objective} "
            f"requires {scoring.classes}: set train.labels to the names that it was trained with"
        )


def _scored(
    model: QLoRAModel, dataset: Dataset, settings: Config, observer: Observer
) -> HeldOutLoss:
    def progress(done: int, rows: int) -> None:
        observer.activity(f"evaluating the adapter: {done:,} of {rows:,} rows")

    model.options = training_options(settings.train)
    scoring = model.options.objective.scoring
    assert scoring is not None
    data = ScoredData(dataset, scoring, max(settings.data.max_seq_length, dataset.longest))
    asked = model, LocalExecutor(model), data, dataset, settings.rows_at_once
    found = scored_loss(*asked, progress)
    observer.activity("")
    matrix = None if found.confusion is None else found.confusion.matrix.tolist()
    labels = settings.train.labels or ()
    return HeldOutLoss(found.loss, found.count, None, found.metrics, labels, matrix)


# ---- DPO, ORPO and KTO ---------------------------------------------------------------------------


def preference_evaluator(
    model: QLoRAModel, dataset: Dataset, settings: Config, preference: Preference,
    observer: Observer, images: BatchImages | None = None,
) -> Callable[[Callable[[int, int], None]], HeldOutLoss]:  # fmt: skip
    """Computes the reference model's log probabilities; each call evaluates the current model."""
    executor, rows = LocalExecutor(model, images=images is not None), settings.rows_at_once
    model.options = training_options(settings.train)
    longest = max(settings.data.max_seq_length, dataset.longest)
    init_from = settings.lora.init_from if preference.has_reference else None
    with model.adapter_off() if init_from is None else _active_adapter(model, init_from):
        reference = ReferenceModel(model, executor, dataset, preference, rows, longest, images)
        references = reference.logps(keep=settings.data.cache, progress=observer.activity)
    answers = PreferenceData(dataset, preference, references, longest, images)

    def measured(progress: Callable[[int, int], None]) -> HeldOutLoss:
        loss, count, *sums = answer_sums(model, executor, answers, dataset, rows, progress)
        metrics = answer_metrics(settings.train, sums)
        return HeldOutLoss(loss / count, int(count), None, metrics)

    return measured


@contextmanager
def _active_adapter(model: QLoRAModel, folder: str) -> Iterator[None]:
    """While it is entered, the model uses the adapter in a folder."""
    if model.adapter.trained_rows or model.adapter.trained_whole:
        with _replaced_parameters(model, folder):
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
def _replaced_parameters(model: QLoRAModel, folder: str) -> Iterator[None]:
    """``_active_adapter`` for an adapter of the same shape, if a second one cannot be loaded."""
    with model.device.in_turn, model.biases.off():
        before, kept = model.parameters_changed, model.read_flat(model.adapter.parameters).copy()
        with named_init_from():
            AdapterModel.load_adapter(model, folder)  # the model keeps its own folder
        try:
            yield
        finally:
            model.write_parameters(kept)
            model.parameters_changed = before
