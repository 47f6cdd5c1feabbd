"""Reading a data file, folder or hub name into a data set of token ids and labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.cache_folder import cache_problem
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data.chat import ChatTemplate, find_chat_template
from qlora_wgpu.data.examples import Dataset, Example
from qlora_wgpu.data.formats import Encoded, is_blank
from qlora_wgpu.data.given_rows import lasting
from qlora_wgpu.data.hub_datasets import download, is_dataset_name
from qlora_wgpu.data.preference_source import AnswersInMemory, AnswerSource, unit_of
from qlora_wgpu.data.preparation import Preparation
from qlora_wgpu.data.prepared import cache_folder, prepare
from qlora_wgpu.data.row_source import RowsInMemory, RowSource
from qlora_wgpu.data.sources import holds_documents, place_of, read_rows, select_files
from qlora_wgpu.data.splits import RowSlice, Selection
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, brief
from qlora_wgpu.presence import exists

__all__ = ["Dataset", "Example", "Preparation", "load_dataset"]


def load_dataset(
    path: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | str | os.PathLike[str],
    max_seq_length: int,
    chat_template: str | None = None,
    *,
    how: Preparation | None = None,
    held_out: bool = False,
    cache: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Dataset:
    """Reads data and encodes it.

    A ``.jsonl`` file has one JSON object per line, a ``.json`` file a list of them, a ``.csv`` file
    the names of its columns in the first line; all rows have one of the formats in
    ``qlora_wgpu.data.formats``. A ``.txt`` file is one document, cut into windows that are
    learnt whole, of which the last is as long as what is left. A folder stands for its
    files, or for one split where they are named for splits (``FOLDER:SPLIT`` names another), a name
    of the form owner/name[:split] for a data set of the Hugging Face hub.

    Args:
        path: The file, folder or name; or the rows themselves, as mappings.
        tokenizer: The model's tokenizer, or the model's folder.
        max_seq_length: Longest example in tokens, at least 2.
        chat_template: ``data.chat_template``: see ``find_chat_template``.
        how: Everything else about the preparation, instead of the two before.
        held_out: Whether it is read to be measured on, which decides between splits.
        cache: Whether what is prepared is kept on disk for the next time, where that is possible.
        progress: Called now and then with the number of rows that are done.

    Raises:
        DataError: If a file cannot be read, a row is wrong, or there is nothing to learn.
        TokenizerError: If the chat template is broken.
    """
    how = how or Preparation(max_seq_length, chat_template)
    if not isinstance(tokenizer, Tokenizer | str | os.PathLike):
        raise DataError(
            f"tokenizer must be a Tokenizer or the model's folder, got {type(tokenizer).__name__}"
        )
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_folder(tokenizer)
    if not isinstance(path, str | os.PathLike):
        return encode_rows(path, tokenizer, how)
    source = _open(path, tokenizer, how, progress, held_out=held_out)
    keeps = cache and cache_problem() is None
    folder = cache_folder() / source.key if keeps else None
    dataset = prepare(folder, source.fill)
    dataset.left_out = source.left_out
    dataset.unit = unit_of(how)
    return dataset


def encode_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, how: Preparation, name: str = "rows"
) -> Dataset:
    """Encodes rows that are in memory, as ``load_dataset`` does those of a file.

    Args:
        rows: Mappings of one of the formats in ``qlora_wgpu.data.formats``.
        tokenizer: The model's tokenizer.
        how: Settings of the preparation.
        name: For messages: ``rows[0]``.

    Raises:
        DataError: If a row is wrong, or there is nothing to learn.
        TokenizerError: If the chat template is broken.
    """
    dataset = prepare(None, _in_memory(rows, tokenizer, how, name).fill)
    dataset.unit = unit_of(how)
    return dataset


def encoded_examples(
    path: str | os.PathLike[str], tokenizer: Tokenizer, how: Preparation, *, held_out: bool = False
) -> Iterator[Encoded]:
    """Yields what ``load_dataset`` would read, with the text of each example.

    Rows with nothing to learn are yielded, too, which it leaves out.

    Raises:
        DataError: If a file cannot be read or a row is wrong.
        TokenizerError: If the chat template is broken.
    """
    source = _open(path, tokenizer, how, lambda rows: None, held_out=held_out)
    return source.examples(empty=True)


def row_format(
    path: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    how: Preparation,
) -> str:
    """A key of ``FORMATS``: what ``load_dataset`` takes the rows for, ``text`` for documents.

    Raises:
        DataError: If a file cannot be read or its first row is wrong.
    """
    if not isinstance(path, str | os.PathLike):
        return _in_memory(path, tokenizer, how, "rows").row_format
    return _open(path, tokenizer, how, lambda rows: None).row_format


def first_row(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The first row of a file, folder or name that holds anything; None of documents.

    Raises:
        DataError: If it cannot be read.
    """
    files = _select(path, held_out=False).files
    if holds_documents(list(files)):
        return None
    rows = (row for file in files for _, row in read_rows(file))
    return next((row for row in rows if not is_blank(row)), None)


def _open(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    how: Preparation,
    progress: Callable[[int], None],
    *,
    held_out: bool = False,
) -> RowSource:
    template = _template(how, tokenizer)
    selection = _select(path, held_out=held_out)
    kind = RowSource if how.objective == "sft" else AnswerSource
    source = kind(selection.name, list(selection.files), tokenizer, template, how, progress)
    source.left_out, source.root = selection.left_out, selection.root
    source.slice = selection.rows
    if selection.rows is not None and holds_documents(list(selection.files)):
        raise DataError(
            f"{path} is text, which has no rows to take a slice of: leave {selection.rows.text} out"
        )
    return source


def _in_memory(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, how: Preparation, name: str
) -> RowsInMemory:
    rows = lasting(rows)
    if isinstance(rows, Mapping):
        raise DataError(f"{name} must be a list of rows, not one mapping: put it into a list")
    if not (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
        raise DataError(f"{name} must be a path or a list of rows, got {type(rows).__name__}")
    template = _template(how, tokenizer)
    kind = RowsInMemory if how.objective == "sft" else AnswersInMemory
    source = kind(name, [Path(name)], tokenizer, template, how, lambda rows: None)
    source.rows = rows
    return source


def _template(how: Preparation, tokenizer: Tokenizer) -> ChatTemplate | None:
    if not isinstance(how.max_seq_length, int | np.integer):
        raise DataError(f"max_seq_length must be a whole number, got {brief(how.max_seq_length)}")
    if how.max_seq_length < 2:
        raise DataError(f"max_seq_length must be at least 2, got {how.max_seq_length}")
    return find_chat_template(how.chat_template, tokenizer)


def _select(path: str | os.PathLike[str], *, held_out: bool) -> Selection:
    text = str(path)
    if not exists(Path(place_of(text).path)) and is_dataset_name(text):
        rows = DataPlace.parse(text).rows
        selection = download(text.removesuffix(rows), held_out=held_out)
        return replace(selection, rows=RowSlice.parse(rows))
    return select_files(Path(path), held_out=held_out)
