"""The data of a run, from files, rows or token ids, and warnings about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import read_manifest
from qlora_wgpu.config import Config, DataConfig, TrainConfig
from qlora_wgpu.config.loading import find_run
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.config.sections.train import SCORED
from qlora_wgpu.data import (
    IGNORE_INDEX,
    Dataset,
    Example,
    PreprocessConfig,
    PromptFormat,
    Tokenizer,
    is_dataset_name,
    load_dataset,
    row_format,
    rows_in_both,
    train_test_split,
)
from qlora_wgpu.data.columns import CHATS, is_numeric
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.mixture import MixtureSource, interleave
from qlora_wgpu.data.row_source import materialize
from qlora_wgpu.data.splits import TEST, TRAIN, VALIDATION, in_words
from qlora_wgpu.errors import CheckpointError, ConfigError, DataError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.files import exists
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.limits import TOKEN_ID
from qlora_wgpu.model.batch_encoding import MEDIA_TOKEN, first_media_id
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.observers import Observer, SourceShare
from qlora_wgpu.training.policies import RolloutPlan
from qlora_wgpu.training.run_folder import checkpoint_folders

# Desirable to undesirable, weights times numbers: equation 8 of arXiv 2402.01306
_SHARES = (1.0, 1.33)


def check_unpaired_balance(rows: Dataset, settings: TrainConfig, observer: Observer) -> None:
    """Warns of answers with weight 0, and of weights that KTO's authors advise against."""
    if settings.objective != "kto":
        return
    desirable, undesirable = _answer_counts(rows)
    sides = (
        (desirable, settings.desirable_weight, "desirable"),
        (undesirable, settings.undesirable_weight, "undesirable"),
    )
    if all(not number or not weight for number, weight, _ in sides):
        names = " and ".join(f"train.{kind}_weight" for number, _, kind in sides if number)
        raise ConfigError(f"{names} is 0 for all answers: there would be nothing to train on")
    for number, weight, kind in sides:
        if number and not weight:
            observer.warning(
                f"train.{kind}_weight is 0: the {number:,} {kind} answers are not trained on, but "
                "count in the average of the loss and, with loss_type kto, in its KL term"
            )
    if not all(number and weight for number, weight, _ in sides) or desirable == undesirable:
        return
    ratio = desirable * settings.desirable_weight / (undesirable * settings.undesirable_weight)
    low, high = _SHARES
    if not low - 0.005 <= ratio <= high + 0.005:
        one = undesirable * settings.undesirable_weight / desirable
        other = desirable * settings.desirable_weight / undesirable
        observer.warning(
            f"{desirable:,} desirable and {undesirable:,} undesirable answers: KTO's authors "
            f"advise train.desirable_weight from {low * one:.3g} to {high * one:.3g}, or "
            f"train.undesirable_weight from {other / high:.3g} to {other / low:.3g}"
        )


def require_both_kinds(held_out: Dataset | None, config: Config) -> None:
    """Refuses a metric_for_best_model that needs answers which the held-out rows lack."""
    if held_out is None or config.train.objective != "kto":
        return
    name = config.eval.metric_for_best_model
    desirable, undesirable = _answer_counts(held_out)
    for number, kind, side in (
        (desirable, "desirable", "chosen"),
        (undesirable, "undesirable", "rejected"),
    ):
        if not number and name.endswith((f"/{side}", "/margins")):
            raise ConfigError(
                f"eval.metric_for_best_model is {name}, but the held-out rows have no {kind} "
                "answer to measure it on: hold out some, or choose another metric"
            )


def _answer_counts(rows: Dataset) -> tuple[int, int]:
    desirable, undesirable = (rows.lengths.reshape(-1, 2) > 0).sum(axis=0)
    return int(desirable), int(undesirable)


def warn_of_shared_rows(train: Dataset, held_out: Dataset, observer: Observer) -> None:
    """Warns of held-out rows that are also trained on."""
    shared, of = rows_in_both(train, held_out), held_out.num_rows
    if shared == of:
        observer.warning(
            "all rows of data.eval are also in data.train, so the held-out loss does not measure "
            "generalization: hold out rows of data.train with data.eval_split"
        )
    elif shared:
        observer.warning(
            f"{shared:,} of {of:,} {_units(held_out)} of data.eval are also in data.train, so the "
            "held-out loss is too low: remove them from one of the two"
        )


def warn_of_shared_windows(train: Dataset, held_out: Dataset, observer: Observer) -> None:
    """Warns of windows on both sides of a split, since different documents may have equal ones.

    Equal rows, and the windows of one document, are always on the same side.
    """
    if not (train.has_windows or held_out.has_windows):
        return
    if shared := rows_in_both(train, held_out):
        observer.warning(
            f"{shared:,} of the {held_out.num_rows:,} {_units(held_out)} that data.eval_split "
            "holds out are also in other documents of data.train, so the held-out loss is too low: "
            "remove what these documents repeat"
        )


def warn_of_other_split(adapter: str, held_out: Dataset, observer: Observer) -> None:
    """Warns if the held-out rows differ from those in the run of an adapter.

    They differ if the data or the settings of its rows have changed since that run.
    """
    run = find_run(adapter)
    folders = [] if run is None else checkpoint_folders(run)
    if not folders:
        return
    try:
        fingerprint = read_manifest(folders[-1])["held_out_data"]
    except (CheckpointError, KeyError):  # unknown
        return
    if fingerprint != held_out.fingerprint:
        observer.warning(
            "data.eval_split holds out other rows than when the adapter was trained, so it may "
            "have been trained on some of them: data.train or its settings have changed since"
        )


def warn_of_long_rows(
    path: str, dataset: Dataset, positions: int | None, observer: Observer
) -> None:
    """Warns of rows that are longer than the model supports."""
    if positions is None or dataset.longest <= positions:
        return
    count = int((dataset.lengths > positions).sum())
    observer.warning(
        f"{Path(path).name}: {count:,} of {len(dataset):,} rows are longer than the model's "
        f"maximum of {positions:,} tokens (max_position_embeddings in config.json); set "
        f"data.max_seq_length: {positions}"
    )


def warn_of_left_out(
    settings: DataConfig, path: str, dataset: Dataset, observer: Observer, *, held_out: bool
) -> None:
    """Warns of a folder's files that are not read, unless the path names a split."""
    splits = {} if DataPlace.parse(path).split else {**dataset.left_out}
    if held_out:
        splits.pop(TRAIN, None)
    elif settings.eval is not None:  # reading data.eval warns of what it leaves out
        splits = {name: files for name, files in splits.items() if not name}
    if not splits:
        return
    names = in_words([file for files in splits.values() for file in files])
    use, advice = ("measured on", "") if held_out else ("trained on", _how_to_measure(path, splits))
    observer.warning(
        f"{DataPlace.parse(path).name}: files of other splits are not {use}: {names}{advice}"
    )


def _how_to_measure(path: str, splits: Iterable[str]) -> str:
    split = next((name for name in (VALIDATION, TEST) if name in splits), None)
    if split is None:
        return ""
    place = Path(DataPlace.parse(path).path)
    short = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    return f"; data.eval: {short.as_posix()}:{split} evaluates on the held-out split"


def _units(dataset: Dataset) -> str:
    return "windows" if dataset.has_windows else "rows"


# ---- data sets as token ids ----------------------------------------------------------------------

# The keys that are read from a row of token ids, and redundant ones that tokenizers add.
_READ = {"input_ids", "labels", "attention_mask", "token_type_ids", "position_ids",
         "special_tokens_mask", "length", "num_tokens", "id", "idx", "index"}  # fmt: skip
Rows = str | PathLike[str] | Sequence[Any]
"""A data set as a trainer takes it: a path, rows in any format of files, or token ids."""


def encoded(
    dataset: Sequence[Any], name: str, tokenizer: Callable[[], Tokenizer], settings: DataConfig,
    train: TrainConfig | None = None, images: ImageFiles | None = None,
) -> Sequence[Any]:  # fmt: skip
    """Encodes rows in any format of files; token ids are returned unchanged."""
    if isinstance(dataset, Mapping) or not _is_listed(dataset):
        raise DataError(f"{name} must be a path or a list of rows, got {type(dataset).__name__}")
    if is_text(dataset):
        objective = "sft" if train is None else train.objective
        how = preparation(settings, objective, train, images)
        return encode_rows(dataset, tokenizer(), how, name)
    if "weight" in settings.columns:
        raise DataError(
            f"{name} has token ids, for which data.columns.weight is not supported: leave it out"
        )
    return dataset


def preparation(
    settings: DataConfig, objective: str = "sft", train: TrainConfig | None = None,
    images: ImageFiles | None = None,
) -> PreprocessConfig:  # fmt: skip
    """The preprocessing of rows for an objective, from the ``data`` section.

    Labels become numbers by the ``train`` section; without ``images``, images are ignored.
    """
    return PreprocessConfig(
        max_seq_length=settings.max_seq_length,
        chat_template=settings.chat_template,
        row_format=settings.format,
        columns=settings.columns,
        train_on=settings.train_on,
        truncation=settings.truncation,
        objective=objective,
        as_chats=settings.apply_chat_template,
        images=images,
        labels=() if train is None or train.labels is None else tuple(train.labels),
        problem_type="single_label_classification" if train is None else train.problem_type,
    )


def prompt_of_data(
    settings: DataConfig, tokenizer: Tokenizer, objective: str = "sft",
    images: ImageFiles | None = None,
) -> PromptFormat:  # fmt: skip
    """The prompt format of the training data in a ``data`` section.

    Of several sources, it is that of the first with chats, or else of the first.
    """
    kinds = [
        row_format(part.train, tokenizer, preparation(part, objective, images=images))
        for part in settings.parts()
        if part.train is not None
    ]
    kind = next((kind for kind in kinds if kind in CHATS), kinds[0])
    return PromptFormat.of_rows(kind, tokenizer, settings.chat_template)


def _is_listed(dataset: Any) -> bool:
    return hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")


def is_text(dataset: Sequence[Any]) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether rows have to be encoded: mappings without token ids."""
    first = next(iter(dataset), None)
    return isinstance(first, Mapping) and bool(first) and "input_ids" not in first


def as_dataset(dataset: Sequence[Any], name: str, vocab_size: int) -> Dataset:
    """Checks a data set, whose ids must all be below ``vocab_size``, and converts it.

    Items have ``input_ids`` and ``labels`` (-100 to ignore, not shifted), as attributes or keys;
    ``labels`` default to the ids, and an ``attention_mask`` removes the positions where it is 0.
    """
    if isinstance(dataset, Dataset):
        if not len(dataset):
            raise DataError(f"{name} is empty: give at least one example")
        if dataset.max_token_id < vocab_size:
            return dataset
    examples = [_as_example(item, f"{name}[{i}]") for i, item in enumerate(dataset)]
    if not examples:
        raise DataError(f"{name} is empty: give at least one example")
    for i, example in enumerate(examples):
        if len(example) == 0:
            raise DataError(f"{name}[{i}] has no tokens: leave it out")
        labels = example.labels[example.labels != IGNORE_INDEX]
        ids = np.concatenate([example.input_ids, labels])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"{name}[{i}] contains the token id {low if low < 0 else high}, but the "
                f"model's vocab_size is {vocab_size}: use the model's own tokenizer"
            )
    return Dataset(examples)


def _as_example(item: Any, where: str) -> Example:
    if isinstance(item, Example):
        return item
    if not isinstance(item, Mapping) or "input_ids" not in item:
        raise DataError(
            f"{where} must have input_ids and labels, or be a row in a format of files, such as "
            f'{{"text": "..."}}, got {type(item).__name__}'
        )
    unread = sorted(key for key in item if key not in _READ and is_numeric(item[key]))
    if unread:
        raise DataError(
            f"{where} has {unread[0]}, which is not supported: use labels (-100 to mask the "
            "loss) or an attention_mask instead, or leave it out"
        )
    ids = _integers(item["input_ids"], f"{where}.input_ids")
    labels = _integers(item.get("labels", ids), f"{where}.labels")
    if labels.shape != ids.shape:
        raise DataError(f"{where} has {ids.size} input_ids but {labels.size} labels")
    if item.get("attention_mask") is not None:
        mask = _integers(item["attention_mask"], f"{where}.attention_mask")
        if mask.shape != ids.shape:
            raise DataError(
                f"{where} has {ids.size} input_ids but an attention_mask of {mask.size}"
            )
        ids, labels = ids[mask != 0], labels[mask != 0]
    return Example(ids, labels)


def _integers(value: Any, where: str) -> Any:
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"{where} must be a list of integers")
    numbers = np.iinfo(np.int32)
    if array.size and not (numbers.min <= array.min() and array.max() <= numbers.max):
        raise DataError(f"{where} contains a number beyond 32 bits, which is not a token id")
    return array.astype(np.int32)


def refuse_other_objectives(dataset: Dataset, name: str, objective: str) -> None:
    """Refuses data that was prepared for another ``train.objective``."""
    if objective in POLICY_OBJECTIVES:
        if dataset.prompt_row(0) is None:
            raise DataError(
                f"train.objective: {objective} requires prompts: pass a path, or rows with a "
                "prompt, not token ids"
            )
        return
    has_targets = len(dataset) > 0 and dataset[0].targets is not None
    if has_targets or objective in SCORED:
        made_for = "another objective"
        if has_targets:
            made_for = "reward" if dataset.unit == 2 else "classification"
        if made_for != objective:
            raise DataError(
                f"{name} was prepared for {made_for}, not for train.objective: {objective}: pass "
                "a path, or the original rows"
            )
        return
    if dataset.unit == 1:
        if objective != "sft":
            raise DataError(
                f"train.objective: {objective} requires answers: pass a path, or rows with "
                "chosen and rejected answers, not token ids"
            )
        return
    unpaired = (dataset.lengths.reshape(-1, 2) == 0).any(axis=1)
    made_for = "kto" if unpaired.all() else "dpo and orpo"
    if objective not in made_for.split(" and "):
        raise DataError(
            f"{name} was prepared for train.objective {made_for}, not for {objective}: pass the "
            "original rows"
        )


def require_labels(rows: Sequence[Any], name: str, vocabulary: int, consequence: str) -> Dataset:
    """A checked data set, which must have labels."""
    dataset = as_dataset(rows, name, vocabulary)
    if not dataset.num_label_tokens:
        raise DataError(f"{name} has no labels at all: {consequence}")
    return dataset


# ---- mixtures ------------------------------------------------------------------------------------


def _mixed(
    parts: Sequence[Dataset], settings: DataConfig, seed: int, observer: Observer
) -> Dataset:
    if settings.sources is None:
        return parts[0]
    portions = [MixtureSource(source.weight, source.rows) for source in settings.sources]
    names = [_name(source.path) for source in settings.sources]
    mixture = interleave(parts, names, portions, settings.stopping_strategy, seed)
    for each in source_shares(mixture):
        if each.rows > each.of:
            observer.note(
                f"{each.name} has {each.of:,} rows and gives {each.rows:,} per epoch: they are "
                f"trained on {each.rows / each.of:.3g} times"
            )
    return mixture


class SourceCounter:
    """Counts the rows of each source of a mixture that a run has trained on.

    They depend on the plan and the step only, so there is no state.
    """

    def __init__(self, dataset: Dataset, plan: BatchSampler | RolloutPlan) -> None:
        self._names, self._sources, self._plan = dataset.source_names, dataset.source_of, plan
        self._shares = _shares_of_rows(dataset) if self._sources is not None else np.zeros(0)

    def until(self, step: int) -> dict[str, int]:
        """The number of rows of each source, by name, in the first ``step`` steps."""
        if self._sources is None:
            return {}
        epochs, rest = self._plan.examples_until(step)
        size = len(self._names)
        rows = epochs * np.bincount(self._sources, self._shares, size)
        rows += np.bincount(self._sources[rest], self._shares[rest], size)
        return dict(zip(self._names, map(round, rows.tolist()), strict=True))


def source_shares(dataset: Dataset) -> tuple[SourceShare, ...]:
    """The rows and tokens of each source of a mixture; empty for other data sets."""
    names, sources = dataset.source_names, dataset.source_of
    if sources is None:
        return ()
    rows = np.bincount(sources, _shares_of_rows(dataset), len(names))
    tokens = np.bincount(sources, dataset.label_counts, minlength=len(names))
    return tuple(
        SourceShare(name, round(rows[i]), dataset.source_sizes[i], int(tokens[i]))
        for i, name in enumerate(names)
    )


def _shares_of_rows(dataset: Dataset) -> npt.NDArray[np.float64]:
    """The share of its row that each example has: half for a paired answer, otherwise all."""
    if dataset.unit == 1:
        return np.ones(len(dataset))
    present = dataset.lengths.reshape(-1, dataset.unit) > 0
    shares: npt.NDArray[np.float64] = present / present.sum(axis=1, keepdims=True)
    return shares.ravel()


def _name(path: str) -> str:
    is_on_hub = not exists(Path(path)) and is_dataset_name(path)
    return path if is_on_hub else DataPlace.parse(path).name


# ---- reading -------------------------------------------------------------------------------------


def check_ids(path: str, dataset: Dataset, architecture: Architecture) -> None:
    """Refuses token ids beyond the model's vocabulary, and those that it embeds as no text's."""
    vocabulary, media_ids = architecture.vocab_size, architecture.media_ids
    if dataset.max_token_id < architecture.text_vocab_size:
        return
    for number, example in enumerate(dataset, 1):
        if (token := first_media_id(example.input_ids, media_ids)) is not None:
            raise DataError(f"{path}: example {number} has the token id {token}, {MEDIA_TOKEN}")
        largest = int(example.input_ids.max(initial=-1))
        if largest >= vocabulary:
            raise DataError(
                f"{path}: example {number} has the token id {largest}, but the model's vocab_size "
                f"(config.json) is {vocabulary}: put the model's own tokenizer.json into its folder"
            )


class DataReader:
    """Reads the data of a run, from its configuration or from a program."""

    def __init__(
        self, config: Config, tokenizer: Callable[[], Tokenizer], observer: Observer, *,
        architecture: Architecture | None = None, positions: int | None = None,
        train: Rows | None = None, held_out: Rows | None = None, images: ImageFiles | None = None,
    ) -> None:  # fmt: skip
        """Reads nothing yet.

        Token ids must be those of ``architecture``'s texts, and rows should not exceed
        ``positions``. Without ``train`` and ``held_out``, the data is that of the configuration.
        ``images`` are as for ``preparation``.
        """
        self._images = images
        self._config = config
        self._tokenizer = tokenizer
        self._observer = observer
        self._architecture, self._positions = architecture, positions
        self._train, self._held_out = materialize(train), materialize(held_out)
        if train is None and held_out is None:
            self._held_out = config.data.eval

    def read(self) -> tuple[Dataset, Dataset | None]:
        """Reads the training data and the held-out data, if there is any."""
        train = self._whole()
        if self._held_out is not None:
            held_out = self._read_held_out(self._held_out)
            warn_of_shared_rows(train, held_out, self._observer)
            return train, held_out
        if self._config.data.eval_split is None:
            return train, None
        train, held_out = self._split(train, self._config.data.eval_split)
        warn_of_shared_windows(train, held_out, self._observer)
        return train, held_out

    def read_one(self, *, held_out: bool) -> Dataset:
        """Reads only the training data, or only the held-out data."""
        if held_out and self._held_out is not None:
            return self._read_held_out(self._held_out)
        whole, split = self._whole(), self._config.data.eval_split
        return whole if split is None else self._split(whole, split)[held_out]

    def _whole(self) -> Dataset:
        """The training data before rows are held out."""
        if self._train is not None:
            return self._dataset(self._train, "train_dataset", self._config.data)
        settings = self._config.require_train()
        parts = [self._dataset(str(each.train), "", each) for each in settings.parts()]
        return _mixed(parts, settings, self._config.train.seed, self._observer)

    def _read_held_out(self, rows: Rows) -> Dataset:
        return self._dataset(rows, "eval_dataset", self._config.data, held_out=True)

    def _split(self, whole: Dataset, size: float) -> tuple[Dataset, Dataset]:
        return train_test_split(whole, size, self._config.train.seed)

    def prompt(self) -> PromptFormat | None:
        """The prompt format of the training data; None for token ids."""
        settings, objective = self._config.data, self._config.train.objective
        train = self._train
        if train is None:
            return prompt_of_data(settings, self._tokenizer(), objective, self._images)
        if not isinstance(train, str | PathLike) and not is_text(train):
            return None
        how = preparation(settings, objective, images=self._images)
        kind = row_format(train, self._tokenizer(), how)
        return PromptFormat.of_rows(kind, self._tokenizer(), settings.chat_template)

    def _dataset(
        self, rows: Rows, name: str, settings: DataConfig, *, held_out: bool = False
    ) -> Dataset:
        if isinstance(rows, str | PathLike):
            name = fspath(rows)
            dataset = self._of_files(name, settings, held_out=held_out)
            if self._architecture is not None:
                check_ids(name, dataset, self._architecture)
        else:
            tokens = encoded(
                rows, name, self._tokenizer, settings, self._config.train, self._images
            )
            of = self._architecture
            dataset = as_dataset(tokens, name, TOKEN_ID if of is None else of.vocab_size)
            if of is not None:
                check_ids(name, dataset, of)
            if tokens is rows:  # token ids: whoever encoded them got the warnings
                return dataset
            for text in dataset.warnings:
                self._observer.warning(text)
        warn_of_long_rows(name, dataset, self._positions, self._observer)
        return dataset

    def _of_files(self, path: str, settings: DataConfig, *, held_out: bool) -> Dataset:
        """Reads and encodes files, or reads the cache of an earlier run."""
        name, observer = Path(path).name, self._observer
        observer.activity(f"preparing {name}")
        dataset = load_dataset(
            path,
            self._tokenizer(),
            settings.max_seq_length,
            how=preparation(
                settings, self._config.train.objective, self._config.train, self._images
            ),
            held_out=held_out,
            cache=settings.cache,
            progress=lambda rows: observer.activity(f"preparing {name}: {rows:,} rows"),
        )
        observer.activity("")
        for text in dataset.warnings:
            observer.warning(text)
        warn_of_left_out(settings, path, dataset, observer, held_out=held_out)
        return dataset
