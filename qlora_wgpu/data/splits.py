"""Splits of a data set, by the names of its files and folders or by its README.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from qlora_wgpu.config.yaml import parse_yaml_mapping
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.files import file_text, is_file
from qlora_wgpu.limits import YAML_BYTES

# ---- by the names of files -----------------------------------------------------------------------

TRAIN, VALIDATION, TEST = "train", "validation", "test"

_NAMES = {
    TRAIN: "train training",
    VALIDATION: "validation valid val dev eval evaluation heldout",
    TEST: "test testing",
}
_SPLIT_OF = {name: split for split, names in _NAMES.items() for name in names.split()}
_NEUTRAL = "of data dataset set split file part shard chunk v"
_UNINFORMATIVE = frozenset(["", *_NEUTRAL.split()])
_SEPARATOR = re.compile(r"[^a-z0-9]+")
_HELD_OUT_FIRST = (VALIDATION, TEST, TRAIN)


@dataclass(frozen=True)
class RowSlice:
    """Rows of a split, as ``datasets`` writes them: ``[100:200]``, ``[:80%]``, ``[-10%:]``."""

    text: str  # the slice, with its brackets

    @classmethod
    def parse(cls, text: str) -> RowSlice | None:
        """Parses a slice; None for all rows."""
        if not text:
            return None
        rows = cls(text)
        if any(abs(int(end[:-1])) > 100 for end in rows._ends if end.endswith("%")):
            raise DataError(f"the slice {text} exceeds 100%")
        return rows

    @property
    def _ends(self) -> tuple[str, str]:
        begin, _, end = self.text[1:-1].partition(":")
        return begin or "0", end or str(sys.maxsize)

    def of(self, count: Callable[[], int]) -> tuple[int, int]:
        """The half-open range of row indices; rows are counted only if it depends on that."""
        is_relative = any(end.startswith("-") or end.endswith("%") for end in self._ends)
        total = count() if is_relative else 0
        begin, end = (_row_number(each, total) for each in self._ends)
        return begin, end


def _row_number(end: str, total: int) -> int:
    number = int(end.removesuffix("%"))
    if end.endswith("%"):
        number = round(number * total / 100)
    return max(total + number, 0) if end.startswith("-") else number


@dataclass(frozen=True)
class SplitFiles:
    """The files of a data set's split, and those of its other splits."""

    name: str  # the data set's name, for messages
    files: Sequence[Path]
    split: str  # empty if their names tell none
    left_out: dict[str, list[str]]  # names of the other files by split
    root: Path | None = None  # the folder that was named, if any
    rows: RowSlice | None = None  # a slice over all files; None for all rows


def canonical(split: str) -> str:
    """A split's canonical name, such as ``validation`` for ``dev``."""
    return _SPLIT_OF.get(split.lower(), split)


def by_split(
    files: Iterable[PurePosixPath], *, loosely: bool = False
) -> dict[str, list[PurePosixPath]]:
    """Files by the split in their names or in the nearest folder's; "" stands for none.

    A name is a split's if it has no other words (``train``, ``test-00000-of-00002``,
    ``data_valid``). A split's name among other words counts only if another name confirms it: one
    that differs in that word alone (``gsm8k_train``, ``gsm8k_test``) or lacks it (``chats``,
    ``chats_test``), or if the training split is known anyway. ``dev-team`` next to ``sales-team``
    is not a split. ``loosely`` counts all.
    """
    files = list(files)
    stems = _splits_by_name({file.stem for file in files}, loosely=loosely)
    parts = {part for file in files for part in file.parent.parts}
    folders = _splits_by_name(parts, loosely=loosely)
    splits: dict[str, list[PurePosixPath]] = {}
    for file in files:
        named = [stems[file.stem], *(folders[part] for part in reversed(file.parent.parts))]
        splits.setdefault(next(filter(None, named), ""), []).append(file)
    return splits


class _Reading(NamedTuple):
    """A name with a split's name among its words, which is "" in ``words``."""

    split: str
    words: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(filter(None, self.words))


def _splits_by_name(names: Set[str], *, loosely: bool) -> dict[str, str]:
    """The split of each name among several in the same place; "" for none."""
    readings = {name: reading for name in names if (reading := _reading(name)) is not None}
    splits: dict[tuple[str, ...], set[str]] = {}
    for reading in readings.values():
        splits.setdefault(reading.words, set()).add(reading.split)
    without = {tuple(_words(name)) for name in names - readings.keys()}

    def is_confirmed(reading: _Reading) -> bool:
        words, others = reading.words, reading.others
        return not others or len(splits[words]) > 1 or others in without

    has_train = any(r.split == TRAIN and is_confirmed(r) for r in readings.values())
    only_readings = not names - readings.keys()
    all_count = loosely or has_train or (only_readings and _are_alike(readings.values()))
    return {
        name: readings[name].split
        if name in readings and (all_count or is_confirmed(readings[name]))
        else ""
        for name in names
    }


def _are_alike(readings: Iterable[_Reading]) -> bool:
    """Whether all names begin, or all end, with a split's name, and one is the training split's."""
    readings = list(readings)
    splits = {reading.split for reading in readings}
    ends = any(all(reading.words[place] == "" for reading in readings) for place in (0, -1))
    return TRAIN in splits and len(splits) > 1 and ends


def _reading(name: str) -> _Reading | None:
    words = _words(name)
    splits = {_SPLIT_OF[word] for word in words if word in _SPLIT_OF}
    if len(splits) != 1:
        return None
    return _Reading(splits.pop(), tuple("" if word in _SPLIT_OF else word for word in words))


def _words(name: str) -> list[str]:
    """The words of a name, without numbers and generic words."""
    words = (word.rstrip("0123456789") for word in _SEPARATOR.split(name.lower()))
    return [word for word in words if word not in _UNINFORMATIVE]


def chosen_split(splits: Iterable[str], split: str | None, where: str, *, held_out: bool) -> str:
    """The requested split; by default the training split, or else the files of no split."""
    present = set(splits)
    named = ", ".join(sorted(present - {""})) or "none"
    if split is not None:
        found = split if split in present else canonical(split)
        if found not in present:
            raise DataError(f"{where} has no split {split!r} (its splits: {named})")
        return found
    order = (*_HELD_OUT_FIRST, "") if held_out else (TRAIN, "")
    if choice := [s for s in order if s in present]:
        return choice[0]
    if len(present) == 1:
        return present.pop()
    raise DataError(
        f"{where} has no training split (its splits: {named}): name one as in FOLDER:{VALIDATION}"
    )


def chosen_files(
    splits: Mapping[str, list[PurePosixPath]], split: str | None, where: str, *, held_out: bool
) -> tuple[str, list[PurePosixPath], dict[str, list[str]]]:
    """The chosen split, its files, and the files of the others: see ``chosen_split``."""
    chosen = chosen_split(splits, split, where, held_out=held_out)
    others = {name: list(map(str, files)) for name, files in splits.items() if name != chosen}
    return chosen, splits[chosen], others


def in_words(names: Collection[str], shown: int = 4) -> str:
    """Lists the first names."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join([*names][:shown]) + more


# ---- by README.md --------------------------------------------------------------------------------

CARD = "README.md"
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_CONFIGS = re.compile(r"^configs:.*?(?=^[\w\"']|\Z)", re.DOTALL | re.MULTILINE)
_DEFAULT = "default"
_MAX_LISTED = 8

Names = Sequence[PurePosixPath]
Splits = dict[str, list[PurePosixPath]]


@dataclass(frozen=True)
class Configurations:
    """The configurations in the front matter of a README.md.

    ``configs: [{config_name, data_files}]`` takes precedence over the files' names.
    """

    entries: Mapping[str, Mapping[str, Any]]  # by the configuration's name
    place: str  # the data set, for messages
    prefix: str  # of ``:CONFIGURATION``, in messages

    @classmethod
    def read(cls, folder: Path, name: str = "") -> Configurations | None:
        """The configurations of a folder; None if its README.md lists none."""
        path = folder / CARD
        if not is_file(path):
            return None
        try:
            front = _FRONT.search(file_text(path, YAML_BYTES))
            block = _CONFIGS.search(front[1]) if front else None
            if block is None:
                return None
            listed = parse_yaml_mapping(block[0], str(path), aliases=True).values["configs"]
        except (OSError, UnicodeDecodeError):  # too long, or in another encoding
            return None
        except ConfigError as err:
            raise DataError(f"cannot read the data set's configurations: {err}") from err
        given = listed if isinstance(listed, list) else []
        entries = {
            str(entry.get("config_name", _DEFAULT)): entry
            for entry in given
            if isinstance(entry, Mapping) and (entry.get("data_files") or entry.get("data_dir"))
        }
        place = f"the data set {name}" if name else f"the folder {folder}"
        return cls(entries, place, name or "FOLDER") if entries else None

    def splits_of(self, names: Names, requested: str | None) -> tuple[Splits, str | None] | None:
        """The files of a configuration by split, and the requested split.

        ``requested`` is ``SPLIT``, ``CONFIGURATION``, ``CONFIGURATION/SPLIT`` or None.
        """
        name, split = self._parse(requested)
        entry = self.entries[name]
        raw = _split_patterns(entry)
        folder = str(entry.get("data_dir") or "")
        inside = [name for name in names if not folder or name.is_relative_to(folder)]
        if raw is None:
            return by_split(inside), split
        found = {each: _matching(inside, entry, patterns) for each, patterns in raw.items()}
        if missing := next((each for each, files in found.items() if not files), None):
            raise DataError(
                f"{self.place}: {CARD} lists {', '.join(raw[missing][:_MAX_LISTED])} for the split "
                f"{missing!r}, but no data file matches"
            )
        exact = split is not None and split in found
        plain: Splits = {}
        for each, files in found.items():  # dev is validation, unless both are there
            usual = canonical(each)
            taken = exact or (usual != each and usual in found) or usual in plain
            plain[each if taken else usual] = files
        return plain, split

    def _parse(self, requested: str | None) -> tuple[str, str | None]:
        if requested is not None:
            if requested in self.entries:
                return requested, None
            name, slash, split = requested.rpartition("/")
            if slash and name in self.entries:
                return name, split
        chosen = [n for n, e in self.entries.items() if e.get("default") is True] or [
            name for name in self.entries if name == _DEFAULT or len(self.entries) == 1
        ]
        if not chosen:
            listed = ", ".join(list(self.entries)[:_MAX_LISTED])
            raise DataError(
                f"{self.place} has the configurations {listed}: name one, such as "
                f"{self.prefix}:{next(iter(self.entries))}/{requested or TRAIN}"
            )
        return chosen[0], requested


def _split_patterns(entry: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """The patterns of each split's files; None if the entry has no ``data_files``."""
    given = entry.get("data_files")
    if not given:
        return None
    if isinstance(given, Mapping):
        given = [{"split": split, "path": path} for split, path in given.items()]
    patterns: dict[str, list[str]] = {}
    for item in given if isinstance(given, list) else [given]:
        if not isinstance(item, Mapping):
            item = {"split": TRAIN, "path": item}
        paths = item.get("path")
        listed = paths if isinstance(paths, list) else [paths]
        patterns.setdefault(str(item.get("split", TRAIN)), []).extend(map(str, listed))
    return patterns


def _matching(
    names: Names, entry: Mapping[str, Any], patterns: Sequence[str]
) -> list[PurePosixPath]:
    folder = PurePosixPath(str(entry.get("data_dir") or ""))
    split_patterns = [(folder / pattern).parts for pattern in patterns]
    found = (name for parts in split_patterns for name in names if _matches(name.parts, parts))
    return list(dict.fromkeys(found))


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a glob pattern, both as parts; ``**`` is any number of parts."""
    reached = {0}  # how many parts of the path the pattern so far may match
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(path) + 1)) if reached else reached
        else:
            reached = {n + 1 for n in reached if n < len(path) and fnmatchcase(path[n], part)}
    return len(path) in reached
