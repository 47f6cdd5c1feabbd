"""Loading a file, folder, hub name or rows as a data set, and holding out rows of it."""

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
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.data.chat_template import ChatTemplate, find_chat_template, suitable_template
from qlora_wgpu.data.columns import CHATS, IMAGES, is_blank, with_columns
from qlora_wgpu.data.examples import Counts, Dataset, Example
from qlora_wgpu.data.hub_datasets import download, is_dataset_name
from qlora_wgpu.data.preferences import PAIRED, UNPAIRED, format_of
from qlora_wgpu.data.prepared import cache_folder, key_of, load_or_build
from qlora_wgpu.data.prompt_rows import PromptSource
from qlora_wgpu.data.row_formats import TokenizedExample
from qlora_wgpu.data.row_images import COLUMNS as IMAGE_COLUMNS
from qlora_wgpu.data.row_source import (
    AnswerSource,
    RowSource,
    materialize,
    rows_in_memory,
    rows_of_files,
    unit_of,
)
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.data.scored_rows import LabelledSource, RewardSource, has_label, label_names
from qlora_wgpu.data.sources import holds_documents, place_of, read_rows, select_files
from qlora_wgpu.data.splits import RowSlice, SplitFiles
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, brief
from qlora_wgpu.files import exists
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource

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
    """Loads data and tokenizes it.

    A ``.jsonl`` file has one JSON object per line, a ``.json`` file a list of objects, a ``.csv``
    file its column names in the first line; all rows have the same format. A ``.txt`` file is one
    document, split into windows of ``max_seq_length`` tokens. A folder stands for all of its files,
    or for the training split if their names tell splits (``FOLDER:SPLIT`` names another one), and
    ``owner/name[:split]`` for a data set on the Hugging Face Hub.

    Args:
        path: The file, folder or name; or the rows themselves, as mappings.
        tokenizer: The model's tokenizer, or the model's folder.
        max_seq_length: Maximum length of an example in tokens, at least 2.
        chat_template: A built-in name, a ``.jinja`` file or the template itself; by default the
            tokenizer's.
        how: All settings of the preprocessing, instead of the two above.
        held_out: Whether to load the validation (or else the test) split by default.
        cache: Whether to cache the tokenized data on disk.
        progress: Called from time to time with the number of rows processed.

    Raises:
        DataError: If a file cannot be read, a row is invalid, or no token would be trained on.
        TokenizerError: If the chat template is invalid.
    """
    how = how or PreprocessConfig(max_seq_length, chat_template)
    if not isinstance(tokenizer, Tokenizer | str | os.PathLike):
        raise DataError(
            f"tokenizer must be a Tokenizer or the model's folder, got {type(tokenizer).__name__}"
        )
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_folder(tokenizer)
    selection, source = _open(path, tokenizer, how, progress, held_out=held_out)
    if isinstance(source, PromptSource):
        prompts = source.dataset()
        prompts.left_out = {} if selection is None else selection.left_out
        return prompts
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
    """Tokenizes rows in memory; errors refer to a row as ``rows[0]``, by ``name``."""
    source = _open(rows, tokenizer, how, name=name)[1]
    if isinstance(source, PromptSource):
        return source.dataset()
    dataset = load_or_build(None, source.fill)
    dataset.unit = unit_of(how)
    return dataset


def encoded_examples(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    how: PreprocessConfig,
    *,
    held_out: bool = False,
) -> Iterator[TokenizedExample]:
    """Yields what ``load_dataset`` reads with its text, and also the rows without labels."""
    return _open(path, tokenizer, how, held_out=held_out)[1].examples()


def row_format(
    path: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    how: PreprocessConfig,
) -> str:
    """The format of the rows, a key of ``FORMATS``; ``text`` for documents."""
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
    kind = _SOURCES.get(how.objective, AnswerSource)
    if not isinstance(data, str | os.PathLike):
        rows = partial(rows_in_memory, _listed(data, name), name)
        return None, kind(name, rows, (), tokenizer, _template(how, tokenizer), how, progress)
    template = _template(how, tokenizer)
    selection = _select(data, held_out=held_out)
    documents = selection.files if holds_documents(selection.files) else ()
    if selection.rows is not None and documents:
        raise DataError(f"{data} is text, which has no rows to slice: remove {selection.rows.text}")
    if documents and how.objective != "sft":
        raise DataError(
            f"{selection.name} is text, but train.objective: {how.objective} requires rows with "
            f"{_REQUIRED.get(how.objective, 'answers')}"
        )
    columns = (*IMAGE_COLUMNS, how.columns.get(IMAGES, ""))
    rows = partial(rows_of_files, selection, images=() if how.images is None else columns)
    source = kind(selection.name, rows, documents, tokenizer, template, how, progress)
    return selection, source


_SOURCES: dict[str, type[RowSource]] = {
    "sft": RowSource,
    "reward": RewardSource,
    "classification": LabelledSource,
    **dict.fromkeys(POLICY_OBJECTIVES, PromptSource),
}
"""How rows become examples, by ``train.objective``; others compare answers."""
_REQUIRED = {"classification": "a label", **dict.fromkeys(POLICY_OBJECTIVES, "prompts")}
"""What rows of an objective must have; others require answers."""


def read_label_names(
    path: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    problem_type: str,
) -> list[str]:
    """The names of all labels of a data set; see ``label_names``."""
    if not isinstance(path, str | os.PathLike):
        return label_names(rows_in_memory(_listed(path, "rows"), "rows"), columns, problem_type)
    selection = _select(path, held_out=False)
    if holds_documents(selection.files):
        raise DataError(f"{path} is text, but train.objective: classification requires labels")
    return label_names(rows_of_files(selection), columns, problem_type)


def _listed(rows: Any, name: str) -> Any:
    rows = materialize(rows)
    if isinstance(rows, Mapping):
        raise DataError(f"{name} must be a list of rows, got one mapping: put it into a list")
    if not (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
        raise DataError(f"{name} must be a path or a list of rows, got {type(rows).__name__}")
    return rows


def _key(selection: SplitFiles, source: RowSource) -> str:
    """A hash of the files and of everything else that the examples depend on."""
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
        # Some templates print the date.
        "date": date.today().isoformat() if "strftime_now" in text else "",
        "tokenizer": tokenizer.fingerprint,
        "special_tokens": tokenizer.special_tokens,
        "ends": sorted(tokenizer.eos_token_ids),
        **({"as_chats": True} if how.as_chats else {}),
        **({} if how.objective == "sft" else {"answers": how.objective == "kto"}),
        **(
            {"scored": [how.objective, *how.labels, how.problem_type]}
            if how.objective in ("reward", "classification", *POLICY_OBJECTIVES)
            else {}
        ),
        **({"slice": selection.rows.text} if selection.rows is not None else {}),
        **({"images": _images_of(selection, how.images)} if how.images is not None else {}),
    }
    return key_of(list(selection.files), settings)


def _images_of(selection: SplitFiles, images: ImageFiles) -> list[str]:
    """How images are read, and the folders that their paths are relative to."""
    return [images.fingerprint, *sorted({str(file.parent.absolute()) for file in selection.files})]


def _template(how: PreprocessConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    if not isinstance(how.max_seq_length, int | np.integer):
        raise DataError(f"max_seq_length must be an integer, got {brief(how.max_seq_length)}")
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


# ---- settings by the first row -------------------------------------------------------------------

_OBJECTIVES = {PAIRED: "dpo", UNPAIRED: "kto"}


def first_row(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The first row that is not blank; None for documents."""
    files = _select(path, held_out=False).files
    if holds_documents(files):
        return None
    rows = (row for file in files for _, row in read_rows(file))
    return next((row for row in rows if not is_blank(row)), None)


def infer_objective(data_path: str, columns: Mapping[str, str] | None = None) -> str:
    """``dpo`` for pairs of answers, ``kto`` for labelled ones, ``classification`` for labels.

    Others are ``sft``.
    """
    row = first_row(data_path)
    if row is None:
        return "sft"
    row = with_columns(row, columns or {})
    try:
        return _OBJECTIVES[format_of(row, "kto")]
    except DataError:
        return "classification" if has_label(row) else "sft"


def infer_chat_template(
    data_path: str,
    tokenizer: Tokenizer,
    objective: str = "sft",
    columns: Mapping[str, str] | None = None,
) -> str | None:
    """The built-in template to use with chats if the tokenizer has no template; else None."""
    if tokenizer.chat_template is not None:
        return None
    how = PreprocessConfig(max_seq_length=2, objective=objective, columns=columns or {})
    if row_format(data_path, tokenizer, how) not in CHATS:
        return None
    return suitable_template(tokenizer)


# ---- held-out rows -------------------------------------------------------------------------------


class Subset(Dataset):
    """A view of some of a data set's examples."""

    def __init__(
        self, whole: Dataset, numbers: npt.NDArray[np.int64], counts: Counts | None = None
    ) -> None:
        """Selects examples by ascending indices; by default each counts as a row."""
        super().__init__((), counts or Counts(rows=len(numbers)))
        self._whole = whole
        self._numbers = numbers
        self.source_names, self.source_sizes = whole.source_names, whole.source_sizes
        self.unit = whole.unit

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def num_others(self) -> int:
        """Number of examples that are not in this part."""
        return len(self._whole) - len(self)

    def _at(self, number: int) -> Example:
        return self._whole[int(self._numbers[number])]

    def prompt_row(self, number: int) -> Any:
        """The ``PromptRow`` of an example; None unless the data set has prompts alone."""
        return self._whole.prompt_row(int(self._numbers[number]))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example."""
        return self._whole.lengths[self._numbers]

    @cached_property
    def label_counts(self) -> npt.NDArray[np.int64]:
        """Positions of each example that the loss is taken over."""
        return self._whole.label_counts[self._numbers]

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """Each example's group: windows of one document and the answers of a pair share one."""
        return self._whole.groups[self._numbers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return int(self.lengths.sum())

    @cached_property
    def image_sources(self) -> Mapping[str, ImageSource]:
        """The images of the examples by their keys."""
        sources = self._whole.image_sources
        return sources and {key: sources[key] for example in self for key in example.images}

    @property
    def source_of(self) -> npt.NDArray[np.int32] | None:
        """The index of each example's data set in ``source_names``; None without a mixture."""
        sources = self._whole.source_of
        return None if sources is None else sources[self._numbers]

    @cached_property
    def max_token_id(self) -> int:
        """Largest token id; -1 if there is none."""
        return max((int(example.input_ids.max(initial=-1)) for example in self), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the data set's contents and the selected indices."""
        digest = hashlib.sha256(self._whole.fingerprint.encode())
        digest.update(self._numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def train_test_split(dataset: Dataset, size: float, seed: int) -> tuple[Dataset, Dataset]:
    """Splits a data set into training and held-out rows, by their contents and a seed.

    The size is a number of rows, or a share below 1; at least that many are held out. Neither the
    order of the rows nor the machine matters. Equal rows and all windows of a document stay on the
    same side.
    """
    groups, row_of = np.unique(dataset.groups, return_inverse=True)
    rows = len(groups)
    count = max(1, round(size * rows)) if size < 1 else int(size)
    if count >= rows:
        together = "" if rows == dataset.num_rows else " (windows of a document stay together)"
        raise DataError(
            f"data.eval_split holds out {count:,} rows, but there are only {rows:,}{together}: "
            "none would be left to train on"
        )
    digests = _digests(dataset, row_of, rows, seed)
    is_held = digests <= np.sort(digests)[count - 1]
    if is_held.all():
        raise DataError(
            "data.eval_split leaves no rows to train on: all rows are equal, and equal rows are "
            "held out together"
        )
    of_example = is_held[row_of]
    held_out = Subset(dataset, np.flatnonzero(of_example), Counts(rows=int(is_held.sum())))
    return Subset(dataset, np.flatnonzero(~of_example), dataset.counts), held_out


def rows_in_both(train: Dataset, held_out: Dataset) -> int:
    """Number of held-out rows (or windows) that are also trained on, by their tokens."""
    lengths = _row_lengths(train)
    rows = range(held_out.num_rows)
    unmatched = Counter(content_digest(_row_ids(held_out, number)) for number in rows)
    shared = 0
    for number in np.flatnonzero(np.isin(lengths, np.unique(_row_lengths(held_out)))):
        shared += unmatched.pop(content_digest(_row_ids(train, int(number))), 0)
    return shared


def _digests(
    dataset: Dataset, row_of: npt.NDArray[np.int64], rows: int, seed: int
) -> npt.NDArray[np.uint64]:
    """A digest of each row over its distinct examples, so that repetitions do not change it."""
    order = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of, minlength=rows))
    begins = np.concatenate([[0], ends[:-1]])

    def ids(row: int) -> npt.NDArray[np.int32]:
        examples = (_content(dataset[int(n)]) for n in order[begins[row] : ends[row]])
        parts = list({part.tobytes(): part for part in examples}.values())
        return parts[0] if len(parts) == 1 == dataset.unit else _joined(parts)

    digests = (content_digest(ids(row), seed) for row in range(rows))
    return np.fromiter(digests, np.uint64, rows)


def _row_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = dataset.lengths.reshape(-1, dataset.unit).sum(axis=1)
    return lengths


def _row_ids(dataset: Dataset, number: int) -> npt.NDArray[np.int32]:
    if dataset.unit == 1:
        return _content(dataset[number])
    first = number * dataset.unit
    return _joined([_content(example) for example in dataset[first : first + dataset.unit]])


def _content(example: Example) -> npt.NDArray[np.int32]:
    """What makes an example differ from others: its token ids and its images."""
    if not example.images:
        return example.input_ids
    keys = np.frombuffer(bytes.fromhex("".join(example.images)), "<i4")
    return np.concatenate([example.input_ids, keys])


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate([array for part in parts for array in (part, [-1])])


def content_digest(ids: npt.NDArray[Any] | list[int], seed: int = 0) -> int:
    """A 64-bit digest of a token sequence, the same on every machine."""
    data = np.asarray(ids, "<i4").tobytes()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
