"""A data set in memory: every example as token ids and labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.chat import find_chat_template
from qlora_wgpu.data.formats import IGNORE_INDEX, RowEncoder, detect_format
from qlora_wgpu.data.sources import check_file, read_rows, read_text
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, TokenizerError


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence.

    Attributes:
        input_ids: Token ids, int32, shape (length,).
        labels: The same ids where the model learns and -100 elsewhere, int32, shape (length,). Not
            shifted: position i is predicted from the positions before it, so label 0 has no effect.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_label_tokens(self) -> int:
        """Number of positions that the loss is taken over."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


class Dataset(Sequence[Example]):
    """Examples in the order of their file.

    Attributes:
        num_label_tokens: Positions that the loss is taken over, in all examples together.
        num_truncated: Examples that were cut to the maximum length.
        num_without_labels: Rows that were left out because nothing in them is learnt.
        warnings: Sentences for the user about what was cut or left out.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        num_truncated: int = 0,
        num_without_labels: int = 0,
        warnings: Sequence[str] = (),
    ) -> None:
        """Holds examples and what is known of their origin."""
        self._examples = list(examples)
        self.num_truncated = num_truncated
        self.num_without_labels = num_without_labels
        self.warnings = tuple(warnings)
        self.num_label_tokens = sum(example.num_label_tokens for example in self._examples)

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        return self._examples[index]

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return sum(map(len, self._examples))

    @property
    def longest(self) -> int:
        """Length of the longest example, in tokens."""
        return max(map(len, self._examples), default=0)

    @property
    def max_token_id(self) -> int:
        """Largest token id, to be compared with the model's vocabulary; -1 if there is none."""
        return max((int(e.input_ids.max()) for e in self._examples if len(e)), default=-1)


def load_dataset(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    max_seq_length: int,
    chat_template: str | None = None,
) -> Dataset:
    """Reads a data file and encodes it.

    A ``.jsonl`` file has one JSON object per line and a ``.json`` file a list of them; all rows
    have one of the formats in ``qlora_wgpu.data.formats``. Rows longer than ``max_seq_length`` are
    cut at the end. A ``.txt`` file is one document, cut into full windows that are learnt whole; a
    last short window is left out unless it is the only one.

    Args:
        path: The file.
        tokenizer: The model's tokenizer.
        max_seq_length: Longest example in tokens, at least 2.
        chat_template: ``data.chat_template``: see ``find_chat_template``.

    Raises:
        DataError: If the file cannot be read, a row is wrong, or there is nothing to learn.
        TokenizerError: If the chat template is broken.
    """
    path = Path(path)
    if max_seq_length < 2:
        raise DataError(f"max_seq_length must be at least 2, got {max_seq_length}")
    if check_file(path) == ".txt":
        return _load_text(path, tokenizer, max_seq_length)
    return _load_rows(path, tokenizer, max_seq_length, chat_template)


def _load_text(path: Path, tokenizer: Tokenizer, max_seq_length: int) -> Dataset:
    ids = np.array(tokenizer.encode(read_text(path)), dtype=np.int32)
    if len(ids) < 2:
        raise DataError(f"{path.name} holds fewer than two tokens: there is nothing to learn")
    num_windows = max(len(ids) // max_seq_length, 1)
    windows = [
        ids[i * max_seq_length : (i + 1) * max_seq_length].copy() for i in range(num_windows)
    ]
    return Dataset([Example(window, window.copy()) for window in windows])


def _load_rows(
    path: Path, tokenizer: Tokenizer, max_seq_length: int, chat_template: str | None
) -> Dataset:
    encoder = RowEncoder(tokenizer, find_chat_template(chat_template, tokenizer))
    examples: list[Example] = []
    truncated = without_labels = 0
    row_format: str | None = None
    first = ""
    for where, row in read_rows(path):
        try:
            found = detect_format(row)
            if row_format is None:
                row_format, first = found, where
            elif found != row_format:
                raise DataError(
                    f"a row of the format '{found}' stands among rows of '{row_format}' "
                    f"({first}): give each format its own file"
                )
            ids, labels = encoder.encode(row, row_format)
        except DataError as err:
            raise DataError(f"{where}: {err}") from err
        except TokenizerError as err:
            raise TokenizerError(f"{where}: {err}") from err
        example = Example(
            np.array(ids[:max_seq_length], dtype=np.int32),
            np.array(labels[:max_seq_length], dtype=np.int32),
        )
        if example.num_label_tokens == 0:
            without_labels += 1
            continue
        truncated += len(ids) > max_seq_length
        examples.append(example)
    dataset = _finish(path, tokenizer, examples, truncated, without_labels, max_seq_length)
    if encoder.num_system_dropped:
        dataset.warnings += (
            f"{path.name}: the chat template leaves the system message out of "
            f"{encoder.num_system_dropped} rows",
        )
    return dataset


def _finish(
    path: Path,
    tokenizer: Tokenizer,
    examples: list[Example],
    truncated: int,
    without_labels: int,
    max_seq_length: int,
) -> Dataset:
    if not examples:
        raise DataError(
            f"{path.name} has nothing to learn within max_seq_length={max_seq_length}: "
            f"all of its {without_labels} rows were left out"
            if without_labels
            else f"{path.name} holds no row at all"
        )
    total = len(examples) + without_labels
    notes: list[str | None] = [
        f"{path.name}: {truncated} of {total} rows are longer than max_seq_length="
        f"{max_seq_length} and were cut at the end"
        if truncated
        else None,
        f"{path.name}: {without_labels} of {total} rows have nothing to learn within "
        f"max_seq_length={max_seq_length} and were left out"
        if without_labels
        else None,
        f"{path.name}: the tokenizer has no end-of-sequence token, so none is learnt"
        if tokenizer.eos_token_id is None
        else None,
    ]
    return Dataset(examples, truncated, without_labels, [note for note in notes if note])
