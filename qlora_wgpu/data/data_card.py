"""The configurations and splits that a data set's README.md lists, as on the Hugging Face hub.

Its front matter says which files make a split: ``configs: [{config_name, data_files}]``. A folder
with such a README is read by it, and not by its files' names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from qlora_wgpu.config.yaml_file import parse_yaml_mapping
from qlora_wgpu.data.splits import TRAIN, by_split, canonical
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import YAML_BYTES
from qlora_wgpu.presence import is_file

CARD = "README.md"
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_CONFIGS = re.compile(r"^configs:.*?(?=^[\w\"']|\Z)", re.DOTALL | re.MULTILINE)
_DEFAULT = "default"
_SHOWN = 8

Names = Sequence[PurePosixPath]
Splits = dict[str, list[PurePosixPath]]


@dataclass(frozen=True)
class Configurations:
    """What a README.md lists.

    Attributes:
        entries: What it says of each configuration, by the configuration's name.
        place: The data set, for messages.
        named: What a configuration's name is put behind.
    """

    entries: Mapping[str, Mapping[str, Any]]
    place: str
    named: str

    @classmethod
    def read(cls, folder: Path, name: str = "") -> Configurations | None:
        """Those of a folder; None where its README.md lists none.

        Args:
            folder: The folder.
            name: The data set's on the hub, if it is of there.

        Raises:
            DataError: If the list cannot be read.
        """
        path = folder / CARD
        if not is_file(path):
            return None
        try:
            front = _FRONT.search(file_text(path, YAML_BYTES))
            block = _CONFIGS.search(front[1]) if front else None
            if block is None:
                return None
            listed = parse_yaml_mapping(block[0], str(path), aliases=True).values["configs"]
        except (OSError, UnicodeDecodeError):  # a text for people: too long, or in another encoding
            return None
        except ConfigError as err:
            raise DataError(f"the data set's configurations cannot be read: {err}") from err
        given = listed if isinstance(listed, list) else []
        entries = {
            str(entry.get("config_name", _DEFAULT)): entry
            for entry in given
            if isinstance(entry, Mapping) and (entry.get("data_files") or entry.get("data_dir"))
        }
        place = f"the data set {name}" if name else f"the folder {folder}"
        return cls(entries, place, name or "FOLDER") if entries else None

    def splits_of(self, names: Names, asked: str | None) -> tuple[Splits, str | None] | None:
        """The files of a configuration by their splits, and the split that is asked for.

        Args:
            names: The data files that are there, from the folder on.
            asked: ``SPLIT``, ``CONFIGURATION`` or ``CONFIGURATION/SPLIT``; None for what is usual.

        Raises:
            DataError: If several configurations may be meant, or files are not there.
        """
        name, split = self._asked(asked)
        entry = self.entries[name]
        raw = _split_patterns(entry)
        inside = [n for n in names if _is_inside(n, str(entry.get("data_dir") or ""))]
        if raw is None:
            return by_split(inside), split
        found = {each: _matching(inside, entry, patterns) for each, patterns in raw.items()}
        if missing := next((each for each, files in found.items() if not files), None):
            raise DataError(
                f"{self.place}: {CARD} names {', '.join(raw[missing][:_SHOWN])} for the split "
                f"{missing!r}, and no data file is called so"
            )
        exact = split is not None and split in found
        plain: Splits = {}
        for each, files in found.items():  # dev is validation, unless both are there
            usual = canonical(each)
            taken = exact or (usual != each and usual in found) or usual in plain
            plain[each if taken else usual] = files
        return plain, split

    def _asked(self, asked: str | None) -> tuple[str, str | None]:
        """The configuration and the split."""
        if asked is not None:
            if asked in self.entries:
                return asked, None
            name, slash, split = asked.rpartition("/")
            if slash and name in self.entries:
                return name, split
        chosen = [n for n, e in self.entries.items() if e.get("default") is True] or [
            name for name in self.entries if name == _DEFAULT or len(self.entries) == 1
        ]
        if not chosen:
            listed = ", ".join(list(self.entries)[:_SHOWN])
            raise DataError(
                f"{self.place} has the configurations {listed}: name one, such as "
                f"{self.named}:{next(iter(self.entries))}/{asked or TRAIN}"
            )
        return chosen[0], asked


def _split_patterns(entry: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """The patterns of each split's files; None where the files' names tell the splits."""
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
    wanted = [(folder / pattern).parts for pattern in patterns]
    found = (name for parts in wanted for name in names if _fits(name.parts, parts))
    return list(dict.fromkeys(found))


def _is_inside(name: PurePosixPath, folder: str) -> bool:
    return name.is_relative_to(PurePosixPath(folder)) if folder else True


def _fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path's parts are as a pattern's: ``**`` is any number of parts."""
    reached = {0}  # parts of the path that the pattern's so far may stand for
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(path) + 1)) if reached else reached
        else:
            reached = {n + 1 for n in reached if n < len(path) and fnmatchcase(path[n], part)}
    return len(path) in reached
