"""The data of a first run, as ``init`` looks at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.data import Dataset, Preparation, Tokenizer, load_dataset, row_format
from qlora_wgpu.data.dataset import first_row
from qlora_wgpu.data.mixture import Joined
from qlora_wgpu.data.objective_choice import chosen_objective
from qlora_wgpu.data.prepared import learns
from qlora_wgpu.data.sources import data_files, holds_documents
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.presence import exists, is_dir

_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_POSITIONS = 4096  # of a model that does not say how many it was made for
_WINDOW, _LONG = 1024, 4096  # of documents, where they are longer than that


@dataclass(frozen=True)
class FirstData:
    """The data of a first run.

    Attributes:
        dataset: Its examples, uncut.
        objective: What its rows are for.
        lengths: Tokens of each row, rising; of a pair, those of the longer answer.
        are_documents: Whether they are texts that are cut into windows.
        are_texts: Whether each row is a text, which may be cut into several.
        length: Tokens of a row that nearly all fit in.
        limit: The most that the model was made for.
    """

    dataset: Dataset
    objective: str
    lengths: list[int]
    are_documents: bool
    are_texts: bool
    length: int
    limit: int

    @classmethod
    def read(
        cls,
        paths: Sequence[str],
        folder: ModelFolder,
        tokenizer: Tokenizer,
        template: str | None,
        columns: Sequence[Mapping[str, str]],
    ) -> FirstData:
        """Reads and encodes it.

        Args:
            paths: The data sets.
            folder: The model's folder.
            tokenizer: The model's tokenizer.
            template: The chat template, where the tokenizer has none.
            columns: The names of each data set's columns.

        Raises:
            DataError: If it cannot be read or has nothing to learn.
            ConfigError: If there are several, and one of them compares or judges answers.
        """
        objective = objective_of(paths, columns)
        each = Preparation(max_seq_length=1 << 20, chat_template=template, objective=objective)
        hows = [replace(each, columns=names) for names in columns]
        parts = [
            load_dataset(path, tokenizer, 2, how=how) for path, how in zip(paths, hows, strict=True)
        ]
        dataset = parts[0] if len(parts) == 1 else Joined(parts, paths)
        lengths = dataset.lengths
        if objective == "dpo":
            lengths = lengths.reshape(-1, 2).max(axis=1)
        rows = np.sort(lengths[lengths > 0]).tolist()
        limit = longest_text(folder.config) or _POSITIONS
        documents = any(
            exists(Path(path)) and holds_documents(data_files(Path(path))) for path in paths
        )
        texts = objective == "sft" and all(
            row_format(path, tokenizer, how) == "text"
            for path, how in zip(paths, hows, strict=True)
        )
        length = _document_length(rows, limit) if texts or documents else _row_length(rows, limit)
        return cls(dataset, objective, rows, documents, texts and not documents, length, limit)

    def windows(self, length: int) -> list[int]:
        """Tokens of the rows that are learnt from: documents and texts are cut into several.

        Args:
            length: The most tokens of a row.
        """
        if not (self.are_texts or self.are_documents):
            return self.lengths
        starts = [(n, begin) for n in self.lengths for begin in (0, *range(length, n - 1, length))]
        return [min(length, n - begin) for n, begin in starts]

    @property
    def is_packable(self) -> bool:
        """Whether rows may share one as they are: documents fill theirs, and pairs stay apart."""
        return not self.are_documents and self.objective == "sft"

    @property
    def is_learnt_at_the_end(self) -> bool:
        """Whether more rows have something to learn in their last tokens than in their first."""
        length = self.length
        first = sum(learns(example.labels[:length].tolist()) for example in self.dataset)
        last = sum(learns(example.labels[-length:].tolist()) for example in self.dataset)
        return not (self.are_documents or self.are_texts) and last > first


def files_apart(path: str) -> list[str]:
    """A folder's files one by one, where their rows have not all the same keys; else the path."""
    place = Path(path)
    if not is_dir(place):
        return [path]
    files = data_files(place)
    if holds_documents(files):
        return [path]
    keys = [(first_row(file) or {}).keys() for file in files]
    return [path] if all(each == keys[0] for each in keys) else [str(file) for file in files]


def columns_by_path(paths: Sequence[str], columns: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Which of the named columns each data set has.

    A column that none has is taken for all of them, so that reading says what is wrong.
    """
    rows = [first_row(path) or {} for path in paths]
    nowhere = {name for name in columns.values() if not any(name in row for row in rows)}
    return [
        {key: name for key, name in columns.items() if name in row or name in nowhere}
        for row in rows
    ]


def objective_of(paths: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """What the data's rows are for, whose columns may have names of their own.

    Raises:
        DataError: If it cannot be read.
        ConfigError: If there are several, whose rows are not for the same.
    """
    objectives = [chosen_objective(path, names) for path, names in zip(paths, columns, strict=True)]
    for path, objective in zip(paths, objectives, strict=True):
        if objective != objectives[0]:
            raise ConfigError(
                f"{path} has rows for train.objective: {objective}, and {paths[0]} for "
                f"{objectives[0]}: a run has one objective, so name those of one kind"
            )
    return objectives[0]


def _document_length(lengths: list[int], limit: int) -> int:
    """The length of windows that documents are cut into."""
    return min(_WINDOW, limit) if _common(lengths) > _LONG else _row_length(lengths, limit)


def _row_length(lengths: list[int], limit: int) -> int:
    """A length that nearly all rows fit in, if the model and most GPUs take it.

    Args:
        lengths: Tokens of each row, rising.
        limit: The model's longest text.
    """
    common = _common(lengths)
    return min(next((b for b in _BUCKETS if b >= common), _BUCKETS[-1]), limit)


def _common(lengths: list[int]) -> int:
    return lengths[min(int(0.98 * len(lengths)), len(lengths) - 1)]
