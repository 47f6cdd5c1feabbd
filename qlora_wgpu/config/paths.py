"""Paths in a configuration, and the files and folders of a run."""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from qlora_wgpu.files import broken_link, exists, is_file

BUILT_IN_CHAT_TEMPLATES = (
    *("chatml", "llama2", "llama3", "gemma", "mistral", "phi", "phi4", "granite", "command-r"),
    *("zephyr", "alpaca", "plain"),
)
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")
_ENDINGS = "|".join(suffix[1:] for suffix in DATA_SUFFIXES)
_NAME_ON_HUB = re.compile(rf"[\w.-]+/(?!.*\.(?:{_ENDINGS})$)[\w.-]+")  # not a file in a folder
_BOUND = r"(?:-?\d{1,18}%?)?"  # of a slice
_PLACE = re.compile(
    rf"(?P<path>.*?)(?::(?P<split>[\w.-][\w./ -]*))?(?P<rows>\[{_BOUND}:{_BOUND}\])?", re.DOTALL
)


class DataPlace(NamedTuple):
    """The location of data, ``PATH:SPLIT[FROM:TO]``."""

    path: str  # a file, a folder or a name on the Hub
    split: str | None = None  # a split, or a configuration and its split: ``main/train``
    rows: str = ""  # a slice of rows with its brackets; empty for all

    @classmethod
    def parse(cls, text: str) -> DataPlace:
        """Parses text, which is only a path if it has no split and no slice."""
        match = _PLACE.fullmatch(text)
        assert match is not None
        return cls(match["path"], match["split"], match["rows"] or "")

    @property
    def name(self) -> str:
        """The last part of the path with split and slice, for messages."""
        return Path(self.path).name + self.ending

    @property
    def ending(self) -> str:
        """Split and slice as written after the path."""
        return (f":{self.split}" if self.split else "") + self.rows


def path_hint(path: Path) -> str | None:
    """A likely reason why a path does not exist: a broken link, or Windows' separators."""
    if (link := broken_link(path)) is not None:
        return link
    return "write / between folders" if os.sep == "/" and "\\" in str(path) else None


def is_inline_template(value: str) -> bool:
    """Whether ``data.chat_template`` is the template itself, not a path or built-in name."""
    return "{{" in value or "{%" in value or "\n" in value


def resolve_path(key: str, value: str, bases: tuple[Path, Path]) -> str:
    """Makes a path absolute, relative to the first of two folders in which it exists.

    What exists in neither stays as it is if it may be a name on the Hub. ``output.dir`` stays as
    it is, too, unless it begins with ``./`` or ``../``.
    """
    if key == "data.chat_template" and (
        value in BUILT_IN_CHAT_TEMPLATES or is_inline_template(value)
    ):
        return value
    expanded = os.path.expanduser(value) if value.startswith("~") else value  # noqa: PTH111
    is_path = Path(expanded).is_absolute() or expanded.replace("\\", "/").startswith(("./", "../"))
    if key == "output.dir":
        return _absolute(bases[0], expanded) if is_path else expanded
    for base in bases:
        if _exists(base / expanded):
            return _absolute(base, expanded)
    if key == "model.path" and not is_path:
        return value
    if key in ("data.train", "data.eval"):
        place = DataPlace.parse(expanded)
        for base in bases if place.path else ():
            if _exists(base / place.path):
                return _absolute(base, place.path) + place.ending
        if not is_path and _NAME_ON_HUB.fullmatch(place.path):
            return value
    return _absolute(bases[0], expanded)


def _absolute(base: Path, value: str) -> str:
    # normpath, not resolve: a link to a data set keeps its name.
    return os.path.normpath(Path.cwd() / base / value)


def _exists(path: Path) -> bool:
    try:
        return exists(path)
    except (OSError, ValueError):  # the name is too long or contains NUL
        return False


CHECKPOINTS = "checkpoints"


class RunPaths:
    """The files and folders of a run."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)  # the run's folder
        self.adapter = self.path / "adapter"  # folder of the final adapter
        self.best = self.path / "best"  # folder of the adapter with the best evaluation
        self.checkpoints = self.path / CHECKPOINTS  # folder of the checkpoints
        self.config = self.path / "config.yaml"  # its settings
        self.metrics = self.path / "metrics.jsonl"  # its log, rows of steps and evaluations
        self.samples = self.path / "samples.jsonl"  # generated samples
        self.progress = (
            self.path / "progress.json"
        )  # its number of steps, and which process runs it
        self.report = self.path / "report.html"  # its report
        self.result = self.path / "result.json"  # its result, once it has ended
        self.plot = self.path / "loss.png"  # a plot of its losses
        self.tensorboard = self.path / "tensorboard"  # folder of TensorBoard's files
        self.wandb_id = self.path / "wandb-id.txt"  # its id at Weights & Biases
        self.replaced = self.path / "replaced"  # folder of the run that this one replaces
        self.lock = self.path / ".lock"  # locked by the process that writes it

    @property
    def needed(self) -> tuple[Path, ...]:
        """What a run consists of and resumes from; if one of them exists, there is a run."""
        return self.adapter, self.best, self.checkpoints, self.metrics, self.config

    @property
    def written(self) -> tuple[Path, ...]:
        """Everything that a run writes."""
        shown = self.samples, self.progress, self.report, self.result, self.plot
        return *self.needed, *shown, self.tensorboard, self.wandb_id

    @property
    def is_run(self) -> bool:
        """Whether the folder has the settings and the log that every run has."""
        return is_file(self.config) and is_file(self.metrics)

    @property
    def kept_run(self) -> Path | None:
        """The run that this one replaces, which is kept until this one has a result."""
        return self.replaced if exists(self.replaced) else None


def run_around(adapter: Path) -> Path:
    """The folder of the run that would contain this adapter or checkpoint."""
    parent = adapter.parent
    return parent.parent if parent.name == CHECKPOINTS else parent
