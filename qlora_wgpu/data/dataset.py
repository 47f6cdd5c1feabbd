"""Reading a file, folder, hub name or rows into a data set, and rows that are held out of it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_problem
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data.chat_template import ChatTemplate, find_chat_template, suitable_template
from qlora_wgpu.data.columns import CHATS, is_blank, with_columns
from qlora_wgpu.data.examples import Counts, Dataset, Example
from qlora_wgpu.data.hub_datasets import download, is_dataset_name
from qlora_wgpu.data.preferences import JUDGED, PAIRS, format_of
from qlora_wgpu.data.prepared import cache_folder, key_of, load_or_build
from qlora_wgpu.data.row_formats import TokenizedExample
from qlora_wgpu.data.row_source import (
    AnswerSource,
    RowSource,
    materialize,
    rows_in_memory,
    rows_of_files,
    unit_of,
)
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.data.sources import holds_documents, place_of, read_rows, select_files
from qlora_wgpu.data.splits import RowSlice, SplitFiles
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, brief
from qlora_wgpu.files import exists

# ---- reading -------------------------------------------------------------------------------------


def load_dataset(
    path: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer | str | os.PathLike[str],
    max_seq_length: int,
    chat_template: str | None = None,
    *,
    how: PreprocessConfig | None = None,
    held_out: bool = False,
    cache: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Dataset:
    """Reads data and encodes it.

    A ``.jsonl`` file has one JSON object per line, a ``.json`` file a list of them, a ``.csv`` file
    the names of its columns in the first line; all rows have one of the formats in
    ``qlora_wgpu.data.row_formats``. A ``.txt`` file is one document, cut into windows that are
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
    how = how or PreprocessConfig(max_seq_length, chat_template)
    if not isinstance(tokenizer, Tokenizer | str | os.PathLike):
        raise DataError(
            f"tokenizer must be a Tokenizer or the model's folder, got {type(tokenizer).__name__}"
        )
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_folder(tokenizer)
    selection, source = _open(path, tokenizer, how, progress, held_out=held_out)
    folder = None
    if cache and selection is not None and cache_problem() is None:
        folder = cache_folder() / _key(selection, source)
    dataset = load_or_build(folder, source.fill)
    dataset.left_out = {} if selection is None else selection.left_out
    dataset.unit = unit_of(how)
    return dataset


def encode_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    how: PreprocessConfig,
    name: str = "rows",
) -> Dataset:
    """Encodes rows that are in memory, as ``load_dataset`` does those of a file.

    Messages call a row by the name, such as ``rows[0]``.
    """
    dataset = load_or_build(None, _open(rows, tokenizer, how, name=name)[1].fill)
    dataset.unit = unit_of(how)
    return dataset


def encoded_examples(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    how: PreprocessConfig,
    *,
    held_out: bool = False,
) -> Iterator[TokenizedExample]:
    """Yields what ``load_dataset`` would read, with the text of each example.

    Rows with nothing to learn are yielded, too, which it leaves out.
    """
    return _open(path, tokenizer, how, held_out=held_out)[1].examples()


def row_format(
    path: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    how: PreprocessConfig,
) -> str:
    """A key of ``FORMATS``: what ``load_dataset`` takes the rows for, ``text`` for documents."""
    return _open(path, tokenizer, how)[1].row_format


def _open(
    data: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    how: PreprocessConfig,
    progress: Callable[[int], None] = lambda rows: None,
    *,
    held_out: bool = False,
    name: str = "rows",
) -> tuple[SplitFiles | None, RowSource]:
    """What reads the rows of files, or of a program, and which files these are."""
    kind = RowSource if how.objective == "sft" else AnswerSource
    if not isinstance(data, str | os.PathLike):
        rows = partial(rows_in_memory, _listed(data, name), name)
        return None, kind(name, rows, (), tokenizer, _template(how, tokenizer), how, progress)
    template = _template(how, tokenizer)
    selection = _select(data, held_out=held_out)
    documents = selection.files if holds_documents(selection.files) else ()
    if selection.rows is not None and documents:
        raise DataError(
            f"{data} is text, which has no rows to take a slice of: leave {selection.rows.text} out"
        )
    rows = partial(rows_of_files, selection)
    source = kind(selection.name, rows, documents, tokenizer, template, how, progress)
    return selection, source


def _listed(rows: Any, name: str) -> Any:
    rows = materialize(rows)
    if isinstance(rows, Mapping):
        raise DataError(f"{name} must be a list of rows, not one mapping: put it into a list")
    if not (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
        raise DataError(f"{name} must be a path or a list of rows, got {type(rows).__name__}")
    return rows


def _key(selection: SplitFiles, source: RowSource) -> str:
    """A hash of the files and of everything besides them that decides what the examples are."""
    how, tokenizer, template = source.how, source.tokenizer, source.template
    text = template.source if template is not None else ""
    tool_source = template.tool_source if template is not None else None
    settings = {
        "max_seq_length": how.max_seq_length,
        "row_format": how.row_format,
        "columns": dict(how.columns),
        "train_on": how.train_on,
        "truncation": how.truncation,
        "template": text,
        **({"tool_template": tool_source} if tool_source else {}),
        # Some templates write the date.
        "date": date.today().isoformat() if "strftime_now" in text else "",
        "tokenizer": tokenizer.fingerprint,
        "special_tokens": tokenizer.special_tokens,
        "ends": sorted(tokenizer.eos_token_ids),
        **({"as_chats": True} if how.as_chats else {}),
        **({} if how.objective == "sft" else {"answers": how.objective == "kto"}),
        **({"slice": selection.rows.text} if selection.rows is not None else {}),
    }
    return key_of(list(selection.files), settings)


def _template(how: PreprocessConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    if not isinstance(how.max_seq_length, int | np.integer):
        raise DataError(f"max_seq_length must be a whole number, got {brief(how.max_seq_length)}")
    if how.max_seq_length < 2:
        raise DataError(f"max_seq_length must be at least 2, got {how.max_seq_length}")
    return find_chat_template(how.chat_template, tokenizer)


def _select(path: str | os.PathLike[str], *, held_out: bool) -> SplitFiles:
    text = str(path)
    if not exists(Path(place_of(text).path)) and is_dataset_name(text):
        rows = DataPlace.parse(text).rows
        selection = download(text.removesuffix(rows), held_out=held_out)
        return replace(selection, rows=RowSlice.parse(rows))
    return select_files(Path(path), held_out=held_out)


# ---- what a first row tells ----------------------------------------------------------------------

_FOR = {PAIRS: "dpo", JUDGED: "kto"}


def first_row(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The first row of a file, folder or name that holds anything; None of documents."""
    files = _select(path, held_out=False).files
    if holds_documents(files):
        return None
    rows = (row for file in files for _, row in read_rows(file))
    return next((row for row in rows if not is_blank(row)), None)


def infer_objective(data_path: str, columns: Mapping[str, str] | None = None) -> str:
    """``dpo`` for pairs of answers, ``kto`` for judged ones, else ``sft``."""
    row = first_row(data_path)
    if row is None:
        return "sft"
    row = with_columns(row, columns or {})
    try:
        return _FOR[format_of(row, "kto")]
    except DataError:
        return "sft"


def infer_chat_template(
    data_path: str,
    tokenizer: Tokenizer,
    objective: str = "sft",
    columns: Mapping[str, str] | None = None,
) -> str | None:
    """The name of the template that a run on some data needs besides the tokenizer.

    None where the tokenizer has a template, or the rows are no chats.
    """
    if tokenizer.chat_template is not None:
        return None
    how = PreprocessConfig(max_seq_length=2, objective=objective, columns=columns or {})
    if row_format(data_path, tokenizer, how) not in CHATS:
        return None
    return suitable_template(tokenizer)


# ---- rows that are held out ----------------------------------------------------------------------


class Subset(Dataset):
    """Some of a data set's examples, which stay where they are."""

    def __init__(
        self, whole: Dataset, numbers: npt.NDArray[np.int64], counts: Counts | None = None
    ) -> None:
        """Chooses examples by their rising numbers; by default each counts as a row."""
        super().__init__((), counts or Counts(rows=len(numbers)))
        self._whole = whole
        self._numbers = numbers
        self.source_names, self.source_sizes = whole.source_names, whole.source_sizes
        self.unit = whole.unit

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def num_others(self) -> int:
        """Number of the whole's examples that are in the other part."""
        return len(self._whole) - len(self)

    def _at(self, number: int) -> Example:
        return self._whole[int(self._numbers[number])]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example."""
        return self._whole.lengths[self._numbers]

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Positions of each example that the loss is taken over."""
        return self._whole.label_counts[self._numbers]

    @cached_property
    def text_numbers(self) -> npt.NDArray[np.int64]:
        """The number of each example's row: windows of one text have the same, and so do pairs."""
        return self._whole.text_numbers[self._numbers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return int(self.lengths.sum())

    @property
    def source_of(self) -> npt.NDArray[np.int32] | None:
        """The number of each example's data set, in ``source_names``; None without a mixture."""
        sources = self._whole.source_of
        return None if sources is None else sources[self._numbers]

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id; -1 if there is none."""
        return max((int(example.input_ids.max(initial=-1)) for example in self), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole's content and of which examples these are."""
        digest = hashlib.sha256(self._whole.fingerprint.encode())
        digest.update(self._numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def train_test_split(dataset: Dataset, size: float, seed: int) -> tuple[Dataset, Dataset]:
    """Parts a data set in what is left and what is held out, by its contents and a seed alone.

    The size is a number of rows, or a share of them where it is below 1; at least so many are held
    out. The same ones are whatever their order and the machine. Rows that are equal stay together,
    and so do the windows of a text, so that no row is learnt and measured.
    """
    texts, row_of = np.unique(dataset.text_numbers, return_inverse=True)
    rows = len(texts)
    count = max(1, round(size * rows)) if size < 1 else int(size)
    if count >= rows:
        together = "" if rows == dataset.num_rows else " (of texts, windows stay together)"
        raise DataError(
            f"data.eval_split holds {count:,} rows out, but there are {rows:,} in all{together}: "
            "nothing would be left to learn from"
        )
    digests = _digests(dataset, row_of, rows, seed)
    is_held = digests <= np.sort(digests)[count - 1]
    if is_held.all():
        raise DataError(
            "data.eval_split leaves nothing to learn from: the rows are all the same, and equal "
            "rows are held out together"
        )
    of_example = is_held[row_of]
    held_out = Subset(dataset, np.flatnonzero(of_example), Counts(rows=int(is_held.sum())))
    return Subset(dataset, np.flatnonzero(~of_example), dataset.counts), held_out


def rows_in_both(train: Dataset, held_out: Dataset) -> int:
    """Number of held-out rows that are learnt from, too: those with the same tokens.

    Of texts that are cut into windows each window is a row. What is held out is in memory, as a
    number for each row; what is learnt passes by.
    """
    lengths = _row_lengths(train)
    rows = range(held_out.num_rows)
    measured = Counter(content_digest(_row_ids(held_out, number)) for number in rows)
    shared = 0
    for number in np.flatnonzero(np.isin(lengths, np.unique(_row_lengths(held_out)))):
        shared += measured.pop(content_digest(_row_ids(train, int(number))), 0)
    return shared


def _digests(
    dataset: Dataset, row_of: npt.NDArray[np.int64], rows: int, seed: int
) -> npt.NDArray[np.uint64]:
    """A number for each row, of the contents of all examples that it has become.

    What a mixture repeats counts once, so that the row has the number that it has alone.
    """
    order = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of, minlength=rows))
    begins = np.concatenate([[0], ends[:-1]])

    def ids(row: int) -> npt.NDArray[np.int32]:
        examples = (dataset[int(n)].input_ids for n in order[begins[row] : ends[row]])
        parts = list({part.tobytes(): part for part in examples}.values())
        if len(parts) == 1 == dataset.unit:
            return parts[0]
        return np.concatenate([array for part in parts for array in (part, [-1])])

    digests = (content_digest(ids(row), seed) for row in range(rows))
    return np.fromiter(digests, np.uint64, rows)


def _row_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = dataset.lengths.reshape(-1, dataset.unit).sum(axis=1)
    return lengths


def _row_ids(dataset: Dataset, number: int) -> npt.NDArray[np.int32]:
    """The tokens of all examples that make a row."""
    first = number * dataset.unit
    if dataset.unit == 1:
        return dataset[first].input_ids
    parts = dataset[first : first + dataset.unit]
    return np.concatenate([part for example in parts for part in (example.input_ids, [-1])])


def content_digest(ids: npt.NDArray[Any] | list[int], seed: int = 0) -> int:
    """A number of 64 bits for a sequence of tokens, the same on every machine."""
    data = np.asarray(ids, "<i4").tobytes()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
