"""The data of a run, as files, rows or token ids, and what a user is told of it."""

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
from qlora_wgpu.files import exists
from qlora_wgpu.limits import TOKEN_ID
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.observers import Observer, SourceFigures
from qlora_wgpu.training.run_folder import checkpoint_folders

_SHARES = (1.0, 1.33)  # of good to bad, weights times numbers: equation 8 of arXiv 2402.01306


def check_unpaired_balance(rows: Dataset, settings: TrainConfig, observer: Observer) -> None:
    """Says what ``kto`` does not learn from, and which weights would balance what is unbalanced."""
    if settings.objective != "kto":
        return
    good, bad = _good_and_bad(rows)
    sides = (
        (good, settings.desirable_weight, "desirable_weight", "good"),
        (bad, settings.undesirable_weight, "undesirable_weight", "bad"),
    )
    if all(not number or not weight for number, weight, _, _ in sides):
        names = " and ".join(f"train.{key}" for number, _, key, _ in sides if number)
        raise ConfigError(f"{names} is 0 for all answers there are: nothing would be learnt")
    for number, weight, key, kind in sides:
        if number and not weight:
            observer.warning(
                f"train.{key} is 0: nothing is learnt from the {number:,} {kind} answers, which "
                "count in the loss's mean and, with loss_type kto, in its KL term"
            )
    if not all(number and weight for number, weight, _, _ in sides) or good == bad:
        return
    found = good * settings.desirable_weight / (bad * settings.undesirable_weight)
    least, most = _SHARES
    if not least - 0.005 <= found <= most + 0.005:
        one = bad * settings.undesirable_weight / good
        other = good * settings.desirable_weight / bad
        observer.warning(
            f"{good:,} good and {bad:,} bad answers: KTO's authors advise train.desirable_weight "
            f"from {least * one:.3g} to {most * one:.3g}, or train.undesirable_weight from "
            f"{other / most:.3g} to {other / least:.3g}"
        )


def require_both_kinds(held_out: Dataset | None, config: Config) -> None:
    """Refuses to look for the best by a figure that comes of answers which are not there."""
    if held_out is None or config.train.objective != "kto":
        return
    name = config.eval.metric_for_best_model
    good, bad = _good_and_bad(held_out)
    for number, kind, side in ((good, "good", "chosen"), (bad, "bad", "rejected")):
        if not number and name.endswith((f"/{side}", "/margins")):
            raise ConfigError(
                f"eval.metric_for_best_model is {name}, but there is no {kind} answer among the "
                "held-out rows to measure it on: hold out some, or name another figure"
            )


def _good_and_bad(rows: Dataset) -> tuple[int, int]:
    good, bad = (rows.lengths.reshape(-1, 2) > 0).sum(axis=0)
    return int(good), int(bad)


def warn_of_learnt_rows(train: Dataset, held_out: Dataset, observer: Observer) -> None:
    """Tells where the held-out loss would say nothing, since its rows are learnt from."""
    shared, of = rows_in_both(train, held_out), held_out.num_rows
    if shared == of:
        observer.warning(
            "all rows of data.eval stand in data.train, too, so the held-out loss does not show "
            "what the model learns for others: data.eval_split holds rows of data.train out"
        )
    elif shared:
        observer.warning(
            f"{shared:,} of {of:,} {_units(held_out)} of data.eval stand in data.train, too, so "
            "the held-out loss is lower than it should be: take them out of one of the two"
        )


def warn_of_learnt_windows(train: Dataset, held_out: Dataset, observer: Observer) -> None:
    """Tells what a split has on both sides: texts that differ may have equal windows.

    Equal rows, and the windows of one text, are on one side.
    """
    if not (train.has_windows or held_out.has_windows):
        return
    if shared := rows_in_both(train, held_out):
        observer.warning(
            f"{shared:,} of the {held_out.num_rows:,} {_units(held_out)} that data.eval_split "
            "holds out stand in other texts of data.train, too, so the held-out loss is lower than "
            "it should be: take out what these texts repeat"
        )


def warn_of_other_split(adapter: str, held_out: Dataset, observer: Observer) -> None:
    """Tells where rows that are held out now were learnt by the run of an adapter.

    Its checkpoints know which rows it was measured on; the data, or what chooses rows of it, has
    changed since where these are others.
    """
    run = find_run(adapter)
    folders = [] if run is None else checkpoint_folders(run)
    if not folders:
        return
    try:
        measured = read_manifest(folders[-1])["held_out_data"]
    except (CheckpointError, KeyError):  # nothing is known of it
        return
    if measured != held_out.fingerprint:
        observer.warning(
            "data.eval_split holds other rows out than when the adapter was trained, so it may "
            "have learnt some of them: data.train or the settings of its rows have changed since"
        )


def warn_of_long_rows(
    path: str, dataset: Dataset, positions: int | None, observer: Observer
) -> None:
    """Tells of rows beyond what a model was made for."""
    if positions is None or dataset.longest <= positions:
        return
    count = int((dataset.lengths > positions).sum())
    observer.warning(
        f"{Path(path).name}: {count:,} of {len(dataset):,} rows are longer than the {positions:,} "
        "tokens that the model was made for (max_position_embeddings in config.json); set "
        f"data.max_seq_length: {positions}"
    )


def tell_left_out(
    settings: DataConfig, path: str, dataset: Dataset, observer: Observer, *, held_out: bool
) -> None:
    """Tells which files of a folder are not read, unless a split is asked for by its name."""
    splits = {} if DataPlace.parse(path).split else {**dataset.left_out}
    if held_out:
        splits.pop(TRAIN, None)
    elif settings.eval is not None:  # what it leaves out in turn is told there
        splits = {name: files for name, files in splits.items() if not name}
    if not splits:
        return
    names = in_words([file for files in splits.values() for file in files])
    use, advice = ("measured on", "") if held_out else ("trained on", _how_to_measure(path, splits))
    observer.warning(
        f"{DataPlace.parse(path).name}: of other splits, and so not {use}: {names}{advice}"
    )


def _how_to_measure(path: str, splits: Iterable[str]) -> str:
    split = next((name for name in (VALIDATION, TEST) if name in splits), None)
    if split is None:
        return ""
    place = Path(DataPlace.parse(path).path)
    short = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    return f"; data.eval: {short.as_posix()}:{split} measures on what is held out"


def _units(dataset: Dataset) -> str:
    return "windows" if dataset.has_windows else "rows"


# ---- data sets as token ids ----------------------------------------------------------------------

# What is read of a row of token ids, and what tokenizers add that says nothing more.
_READ = {"input_ids", "labels", "attention_mask", "token_type_ids", "position_ids",
         "special_tokens_mask", "length", "num_tokens", "id", "idx", "index"}  # fmt: skip
Rows = str | PathLike[str] | Sequence[Any]
"""A data set as a trainer takes it: a path, rows of a format that files have, or token ids."""


def encoded(
    dataset: Sequence[Any], name: str, tokenizer: Callable[[], Tokenizer], settings: DataConfig,
    objective: str = "sft",
) -> Sequence[Any]:  # fmt: skip
    """Rows of a format that files have as token ids; token ids stay as they are."""
    if isinstance(dataset, Mapping) or not _is_listed(dataset):
        raise DataError(f"{name} must be a path or a list of rows, got {type(dataset).__name__}")
    if is_text(dataset):
        return encode_rows(dataset, tokenizer(), preparation(settings, objective), name)
    if "weight" in settings.columns:
        raise DataError(
            f"{name} holds token ids, for which data.columns.weight names no column: leave it out"
        )
    return dataset


def preparation(settings: DataConfig, objective: str = "sft") -> PreprocessConfig:
    """Settings of how rows become examples of an objective, from the ``data`` section."""
    return PreprocessConfig(
        max_seq_length=settings.max_seq_length,
        chat_template=settings.chat_template,
        row_format=settings.format,
        columns=settings.columns,
        train_on=settings.train_on,
        truncation=settings.truncation,
        objective=objective,
        as_chats=settings.apply_chat_template,
    )


def prompt_of_data(
    settings: DataConfig, tokenizer: Tokenizer, objective: str = "sft"
) -> PromptFormat:
    """How prompts are written for the training data that a ``data`` section names.

    Of several sources the first with chats decides, else the first.
    """
    kinds = [
        row_format(part.train, tokenizer, preparation(part, objective))
        for part in settings.parts()
        if part.train is not None
    ]
    kind = next((kind for kind in kinds if kind in CHATS), kinds[0])
    return PromptFormat.of_rows(kind, tokenizer, settings.chat_template)


def _is_listed(dataset: Any) -> bool:
    """Whether it can be gone through, as a list or by number."""
    return hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")


def is_text(dataset: Sequence[Any]) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether the rows are to be encoded: mappings that hold no token ids."""
    first = next(iter(dataset), None)
    return isinstance(first, Mapping) and bool(first) and "input_ids" not in first


def as_dataset(dataset: Sequence[Any], name: str, vocab_size: int) -> Dataset:
    """Checks a data set, all of whose ids must be below ``vocab_size``, and gives it one form.

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
                f"{name}[{i}] holds the token id {low if low < 0 else high}, but the "
                f"model's vocab_size is {vocab_size}: use the model's own tokenizer"
            )
    return Dataset(examples)


def _as_example(item: Any, where: str) -> Example:
    if isinstance(item, Example):
        return item
    if not isinstance(item, Mapping) or "input_ids" not in item:
        raise DataError(
            f"{where} must have input_ids and labels, or be a row as files have it, such as "
            f'{{"text": "..."}}, got {type(item).__name__}'
        )
    unread = sorted(key for key in item if key not in _READ and is_numeric(item[key]))
    if unread:
        raise DataError(
            f"{where} has {unread[0]}, which is not read: give labels (-100 where nothing is "
            "learnt) or an attention_mask instead, or leave it out"
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
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{where} must be a list of integers")
    numbers = np.iinfo(np.int32)
    if array.size and not (numbers.min <= array.min() and array.max() <= numbers.max):
        raise DataError(f"{where} holds a number that is no token id: it is beyond 32 bits")
    return array.astype(np.int32)


def refuse_other_objectives(dataset: Dataset, name: str, objective: str) -> None:
    """Refuses data that was prepared for another ``train.objective``."""
    if dataset.unit == 1:
        if objective != "sft":
            raise DataError(
                f"train.objective: {objective} learns from answers: give a path, or rows with "
                "chosen and rejected answers, not token ids"
            )
        return
    alone = (dataset.lengths.reshape(-1, 2) == 0).any(axis=1)  # KTO judges each by itself
    made_for = "kto" if alone.all() else "dpo and orpo"
    if objective not in made_for.split(" and "):
        raise DataError(
            f"{name} was prepared for train.objective {made_for}, not for {objective}: give the "
            "rows themselves"
        )


def learnable(rows: Sequence[Any], name: str, vocabulary: int, otherwise: str) -> Dataset:
    """A data set that has labels."""
    dataset = as_dataset(rows, name, vocabulary)
    if not dataset.num_label_tokens:
        raise DataError(f"{name} has no label at all: {otherwise}")
    return dataset


# ---- mixtures ------------------------------------------------------------------------------------


def _mixed(
    parts: Sequence[Dataset], settings: DataConfig, seed: int, observer: Observer
) -> Dataset:
    """The data sets that a ``data`` section names, as the one that it makes of them."""
    if settings.sources is None:
        return parts[0]
    portions = [MixtureSource(source.weight, source.rows) for source in settings.sources]
    names = [_name(source.path) for source in settings.sources]
    mixture = interleave(parts, names, portions, settings.stopping_strategy, seed)
    for each in source_figures(mixture):
        if each.rows > each.of:
            observer.note(
                f"{each.name} has {each.of:,} rows and gives {each.rows:,} an epoch: they are "
                f"learnt {each.rows / each.of:.3g} times"
            )
    return mixture


class SourceCounter:
    """Counts the rows that each source of a mixture has given to a run.

    What is learnt follows from the plan and the step alone, so nothing of it is kept.
    """

    def __init__(self, dataset: Dataset, plan: BatchSampler) -> None:
        """Counts nothing where the data set is no mixture."""
        self._names, self._sources, self._plan = dataset.source_names, dataset.source_of, plan
        self._shares = _shares_of_rows(dataset) if self._sources is not None else np.zeros(0)

    def until(self, step: int) -> dict[str, int]:
        """The rows of each source, by its name, that so many steps have learnt."""
        if self._sources is None:
            return {}
        epochs, begun = self._plan.examples_until(step)
        size = len(self._names)
        rows = epochs * np.bincount(self._sources, self._shares, size)
        rows += np.bincount(self._sources[begun], self._shares[begun], size)
        return dict(zip(self._names, map(round, rows.tolist()), strict=True))


def source_figures(dataset: Dataset) -> tuple[SourceFigures, ...]:
    """What each source gives; none of a data set that is no mixture."""
    names, sources = dataset.source_names, dataset.source_of
    if sources is None:
        return ()
    rows = np.bincount(sources, _shares_of_rows(dataset), len(names))
    tokens = np.bincount(sources, dataset.label_counts, minlength=len(names))
    return tuple(
        SourceFigures(name, round(rows[i]), dataset.source_sizes[i], int(tokens[i]))
        for i, name in enumerate(names)
    )


def _shares_of_rows(dataset: Dataset) -> npt.NDArray[np.float64]:
    """Which part of its row each example is: half of a pair, all of an answer that stands alone."""
    if dataset.unit == 1:
        return np.ones(len(dataset))
    present = dataset.lengths.reshape(-1, dataset.unit) > 0
    shares: npt.NDArray[np.float64] = present / present.sum(axis=1, keepdims=True)
    return shares.ravel()


def _name(path: str) -> str:
    is_on_hub = not exists(Path(path)) and is_dataset_name(path)
    return path if is_on_hub else DataPlace.parse(path).name


# ---- reading -------------------------------------------------------------------------------------


def check_ids(path: str, dataset: Dataset, vocabulary: int) -> None:
    """Refuses a tokenizer that makes ids which the model does not have."""
    if dataset.max_token_id < vocabulary:
        return
    for number, example in enumerate(dataset, 1):
        largest = int(example.input_ids.max(initial=-1))
        if largest >= vocabulary:
            raise DataError(
                f"{path}: example {number} has the token id {largest}, but the model knows only "
                f"{vocabulary} (vocab_size in config.json): put the model's own tokenizer.json "
                "into its folder"
            )


class DataReader:
    """Reads the data of a run: what its configuration names, or what a program hands over."""

    def __init__(
        self, config: Config, tokenizer: Callable[[], Tokenizer], observer: Observer, *,
        vocabulary: int | None = None, positions: int | None = None, train: Rows | None = None,
        held_out: Rows | None = None,
    ) -> None:  # fmt: skip
        """Reads nothing yet.

        Args:
            config: The settings.
            tokenizer: Gives the tokenizer, where one is needed.
            observer: Told what a user should know of the data.
            vocabulary: Every token id must be below it; None where there is no model.
            positions: Tokens that the model was made for, if that is known.
            train: The training data; None for ``data.train``, and then for ``data.eval``, too.
            held_out: The held-out data; without any, ``data.eval_split`` holds rows out.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._observer = observer
        self._vocabulary, self._positions = vocabulary, positions
        self._train, self._held_out = materialize(train), materialize(held_out)
        if train is None and held_out is None:
            self._held_out = config.data.eval

    def read(self) -> tuple[Dataset, Dataset | None]:
        """Reads what is learnt and what is measured."""
        learnt = self._whole()
        if self._held_out is not None:
            measured = self._measured(self._held_out)
            warn_of_learnt_rows(learnt, measured, self._observer)
            return learnt, measured
        if self._config.data.eval_split is None:
            return learnt, None
        learnt, measured = self._split(learnt, self._config.data.eval_split)
        warn_of_learnt_windows(learnt, measured, self._observer)
        return learnt, measured

    def read_one(self, *, held_out: bool) -> Dataset:
        """Reads what is learnt, or what is measured, by itself."""
        if held_out and self._held_out is not None:
            return self._measured(self._held_out)
        whole, split = self._whole(), self._config.data.eval_split
        return whole if split is None else self._split(whole, split)[held_out]

    def _whole(self) -> Dataset:
        """What is learnt, together with what is held out of it."""
        if self._train is not None:
            return self._dataset(self._train, "train_dataset", self._config.data)
        settings = self._config.require_train()
        parts = [self._dataset(str(each.train), "", each) for each in settings.parts()]
        return _mixed(parts, settings, self._config.train.seed, self._observer)

    def _measured(self, rows: Rows) -> Dataset:
        return self._dataset(rows, "eval_dataset", self._config.data, held_out=True)

    def _split(self, whole: Dataset, size: float) -> tuple[Dataset, Dataset]:
        return train_test_split(whole, size, self._config.train.seed)

    def prompt(self) -> PromptFormat | None:
        """How prompts are written for what is learnt; None of token ids, which do not say it."""
        settings, objective = self._config.data, self._config.train.objective
        train = self._train
        if train is None:
            return prompt_of_data(settings, self._tokenizer(), objective)
        if not isinstance(train, str | PathLike) and not is_text(train):
            return None
        kind = row_format(train, self._tokenizer(), preparation(settings, objective))
        return PromptFormat.of_rows(kind, self._tokenizer(), settings.chat_template)

    def _dataset(
        self, rows: Rows, name: str, settings: DataConfig, *, held_out: bool = False
    ) -> Dataset:
        """A data set whose ids the model has."""
        objective = self._config.train.objective
        if isinstance(rows, str | PathLike):
            name = fspath(rows)
            dataset = self._of_files(name, settings, held_out=held_out)
            if self._vocabulary is not None:
                check_ids(name, dataset, self._vocabulary)
        else:
            tokens = encoded(rows, name, self._tokenizer, settings, objective)
            dataset = as_dataset(tokens, name, self._vocabulary or TOKEN_ID)
            if tokens is rows:  # who has made token ids of it has been told
                return dataset
            for text in dataset.warnings:
                self._observer.warning(text)
        warn_of_long_rows(name, dataset, self._positions, self._observer)
        return dataset

    def _of_files(self, path: str, settings: DataConfig, *, held_out: bool) -> Dataset:
        """Reads and encodes files, or takes what an earlier run prepared."""
        name, observer = Path(path).name, self._observer
        observer.activity(f"preparing {name}")
        dataset = load_dataset(
            path,
            self._tokenizer(),
            settings.max_seq_length,
            how=preparation(settings, self._config.train.objective),
            held_out=held_out,
            cache=settings.cache,
            progress=lambda rows: observer.activity(f"preparing {name}: {rows:,} rows"),
        )
        observer.activity("")
        for text in dataset.warnings:
            observer.warning(text)
        tell_left_out(settings, path, dataset, observer, held_out=held_out)
        return dataset
