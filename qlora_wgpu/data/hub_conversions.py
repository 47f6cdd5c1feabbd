"""The branch on which the hub keeps a data set as Parquet, by its configurations and splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from qlora_wgpu.data.splits import TRAIN, canonical, chosen_split
from qlora_wgpu.errors import DataError

CONVERTED = "refs/convert/parquet"
_DEFAULT = "default"  # of a data set that names no configuration
_SHOWN = 8

Splits = Mapping[str, Sequence[str]]


def choose_converted(
    name: str, files: Sequence[str], asked: str | None, *, held_out: bool
) -> tuple[str, dict[str, list[str]]]:
    """A split of a configuration.

    Args:
        name: The data set's, for messages.
        files: All of the branch, named as ``CONFIGURATION/SPLIT/0000.parquet``.
        asked: ``CONFIGURATION/SPLIT`` or ``SPLIT``; None for what is usual.
        held_out: Whether it is read to be measured on.

    Returns:
        The split, and the files of all of that configuration's.

    Raises:
        DataError: If there is no such split or configuration, or several may be meant.
    """
    *folders, split = (asked or "").split("/")
    configurations = _configurations(files)
    wanted = "/".join(folders) or _usual(name, configurations, split or TRAIN)
    if wanted not in configurations:
        raise DataError(
            f"the data set {name} has no configuration {wanted!r}: it has "
            f"{_listed(configurations)}, named as in {name}:{next(iter(configurations))}/{TRAIN}"
        )
    splits = configurations[wanted]
    if not split:
        where = f"the data set {name}"
        split = chosen_split(splits, None, where, held_out=held_out) if held_out else TRAIN
    chosen = [each for each in splits if each == split] or [
        each for each in splits if canonical(each) == canonical(split)
    ]
    if not chosen:
        raise DataError(
            f"the configuration {wanted} of the data set {name} has no split {split!r}: it has "
            f"{_listed(splits)}"
        )
    return chosen[0], splits


def _configurations(files: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix == ".parquet" and len(path.parts) > 2:
            splits = found.setdefault(path.parent.parent.as_posix(), {})
            splits.setdefault(path.parent.name, []).append(file)
    return found


def _usual(name: str, configurations: Mapping[str, Splits], split: str) -> str:
    """The configuration that is meant where none is named."""
    if len(configurations) == 1:
        return next(iter(configurations))
    if _DEFAULT in configurations:
        return _DEFAULT
    if not configurations:
        raise DataError(f"the data set {name} has no data file that can be read")
    raise DataError(
        f"the data set {name} has the configurations {_listed(configurations)}: name one, such as "
        f"{name}:{next(iter(configurations))}/{split}"
    )


def _listed(names: Mapping[str, object]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more
