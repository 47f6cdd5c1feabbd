"""Data sets as the trainer takes them: sequences of examples or of plain mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeGuard

import numpy as np

from qlora_wgpu.config import DataConfig
from qlora_wgpu.data import (
    IGNORE_INDEX,
    Dataset,
    Example,
    Preparation,
    PromptFormat,
    Tokenizer,
    load_dataset,
    row_format,
)
from qlora_wgpu.data.columns import is_numeric
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.formats import CHATS
from qlora_wgpu.errors import DataError

# What of a row of token ids is read, and what tokenizers give with them that says nothing more.
_READ = {"input_ids", "labels", "attention_mask", "token_type_ids", "position_ids",
         "special_tokens_mask", "length", "num_tokens", "id", "idx", "index"}  # fmt: skip
Rows = str | PathLike[str] | Sequence[Any]
"""A data set as a trainer takes it: see ``encoded``."""


def encoded(
    dataset: Rows,
    name: str,
    tokenizer: Callable[[], Tokenizer],
    settings: DataConfig,
    *,
    held_out: bool = False,
    objective: str = "sft",
) -> Sequence[Any]:
    """A data set as token ids.

    Args:
        dataset: A path; or rows of a format that files have, such as chats; or token ids in a form
            of ``as_dataset``, which stay as they are.
        name: For messages.
        tokenizer: Gives the tokenizer that encodes, where one is needed.
        settings: How rows are encoded.
        held_out: Whether it is read to be measured on, which decides between a folder's splits.
        objective: ``train.objective``, which says what rows are.

    Raises:
        DataError: If it cannot be read, or a row has no such format.
        TokenizerError: If there is no tokenizer.
    """
    how = preparation(settings, objective)
    if isinstance(dataset, str | PathLike):
        return load_dataset(
            dataset, tokenizer(), how.max_seq_length,
            how=how, held_out=held_out, cache=settings.cache,
        )  # fmt: skip
    if isinstance(dataset, Mapping) or not _is_listed(dataset):
        raise DataError(f"{name} must be a path or a list of rows, got {type(dataset).__name__}")
    if not is_text(dataset):
        if "weight" in settings.columns:
            raise DataError(
                f"{name} holds token ids, for which data.columns.weight names no column: leave it "
                "out"
            )
        return dataset
    return encode_rows(dataset, tokenizer(), how, name)


def preparation(settings: DataConfig, objective: str = "sft") -> Preparation:
    """Settings of how rows become examples of an objective, from the ``data`` section."""
    return Preparation(
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

    Raises:
        DataError: If it cannot be read.
        TokenizerError: If the chat template is broken.
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
    """Checks a data set and gives it one form.

    Args:
        dataset: Items with ``input_ids`` and ``labels`` (-100 to ignore, not shifted), as
            attributes or keys; ``labels`` default to the ids, and an ``attention_mask`` removes
            the positions where it is 0.
        name: For messages.
        vocab_size: Every id must be below it.

    Raises:
        DataError: If it is empty, an item has another form, or an id is outside the vocabulary.
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
    """Refuses data that was prepared for another ``train.objective``.

    Args:
        dataset: The data.
        name: What the caller calls it.
        objective: The run's.

    Raises:
        DataError: If its examples are no rows, no pairs, or no judged answers, as it would need.
    """
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
    """A data set that has labels.

    Args:
        rows: The data.
        name: What the caller calls it.
        vocabulary: Tokens that the model knows.
        otherwise: What follows where there is no label.

    Raises:
        DataError: If it has none, is empty, or does not fit the model.
    """
    dataset = as_dataset(rows, name, vocabulary)
    if not dataset.num_label_tokens:
        raise DataError(f"{name} has no label at all: {otherwise}")
    return dataset
