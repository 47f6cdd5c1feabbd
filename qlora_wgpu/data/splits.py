"""Splits of a data set, told by the names of its files and folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qlora_wgpu.errors import DataError

TRAIN, VALIDATION, TEST = "train", "validation", "test"

_NAMES = {
    TRAIN: "train training",
    VALIDATION: "validation valid val dev eval evaluation heldout",
    TEST: "test testing",
}
_SPLIT_OF = {name: split for split, names in _NAMES.items() for name in names.split()}
_SEPARATOR = re.compile(r"[^a-z0-9]+")
_HELD_OUT_FIRST = (VALIDATION, TEST, TRAIN)
_SHOWN = 4  # files, in a message


@dataclass(frozen=True)
class Selection:
    """The files of a data set that are read, and those that are not.

    Attributes:
        name: The data set's name, for messages.
        files: The files that are read.
        split: Their split; empty where the names tell none.
        left_out: Names of the other files by their split.
    """

    name: str
    files: Sequence[Path]
    split: str
    left_out: dict[str, list[str]]


def canonical(split: str) -> str:
    """A split's own name: of ``dev`` it is ``validation``."""
    return _SPLIT_OF.get(split.lower(), split)


def split_of(file: PurePosixPath) -> str:
    """The split that a file belongs to, by its name or the nearest folder's; empty if none.

    Args:
        file: The file, from the data set's folder on.
    """
    for part in (file.name.partition(".")[0], file.stem, *map(str, reversed(file.parent.parts))):
        words = (word.rstrip("0123456789") for word in _SEPARATOR.split(part.lower()))
        splits = {_SPLIT_OF[word] for word in words if word in _SPLIT_OF}
        if len(splits) == 1:
            return splits.pop()
    return ""


def by_split(files: Iterable[PurePosixPath]) -> dict[str, list[PurePosixPath]]:
    """Files by their split."""
    splits: dict[str, list[PurePosixPath]] = {}
    for file in files:
        splits.setdefault(split_of(file), []).append(file)
    return splits


def chosen_split(splits: Iterable[str], split: str | None, where: str, *, held_out: bool) -> str:
    """The split that is read.

    Without a request, training takes what is named for it, or else what has no split's name.

    Args:
        splits: Those that are there; empty for files that belong to none.
        split: The one that is asked for, if any.
        where: The data set, for messages.
        held_out: Whether it is read to be measured on.

    Raises:
        DataError: If there is no such split, or none to train on.
    """
    present = set(splits)
    named = ", ".join(sorted(present - {""})) or "none"
    if split is not None:
        if canonical(split) not in present:
            raise DataError(f"{where} has no split {split!r}: its files are named for {named}")
        return canonical(split)
    order = (*_HELD_OUT_FIRST, "") if held_out else (TRAIN, "")
    if choice := [s for s in order if s in present]:
        return choice[0]
    if len(present) == 1:
        return present.pop()
    raise DataError(
        f"{where} holds no training data: its files are named for {named}; "
        f"a split is named as in FOLDER:{VALIDATION}"
    )


def in_words(names: Sequence[str]) -> str:
    """Some names of files."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
