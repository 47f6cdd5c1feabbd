"""Relative paths of a configuration, and the names of what a run writes."""

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
# Two parts, the second without a file's ending.
_ENDINGS = "|".join(suffix[1:] for suffix in DATA_SUFFIXES)
_NAME_ON_HUB = re.compile(rf"[\w.-]+/(?!.*\.(?:{_ENDINGS})$)[\w.-]+")
_END = r"(?:-?\d{1,18}%?)?"  # of a slice
_PLACE = re.compile(
    rf"(?P<path>.*?)(?::(?P<split>[\w.-][\w./ -]*))?(?P<rows>\[{_END}:{_END}\])?", re.DOTALL
)


class DataPlace(NamedTuple):
    """Where data is, as ``PATH:SPLIT[FROM:TO]`` names it."""

    path: str  # a file, a folder or a name of the hub
    split: str | None = None  # the split, with its configuration in front of it if one is named
    rows: str = ""  # the slice of its rows, with its brackets; empty for all

    @classmethod
    def parse(cls, text: str) -> DataPlace:
        """A place by its text; one without a split or rows is a path whole."""
        match = _PLACE.fullmatch(text)
        assert match is not None
        return cls(match["path"], match["split"], match["rows"] or "")

    @property
    def name(self) -> str:
        """The last part of the path with what stands behind it, for messages."""
        return Path(self.path).name + self.ending

    @property
    def ending(self) -> str:
        """What stands behind the path."""
        return (f":{self.split}" if self.split else "") + self.rows


def path_hint(path: Path) -> str | None:
    """Why there is nothing at a path, if that is plain: Windows' separators, or a broken link."""
    if (link := broken_link(path)) is not None:
        return link
    return "write / between folders" if os.sep == "/" and "\\" in str(path) else None


def is_inline_template(value: str) -> bool:
    """Whether ``data.chat_template`` is the template itself, not a path or built-in name."""
    return "{{" in value or "{%" in value or "\n" in value


def resolve_path(key: str, value: str, bases: tuple[Path, Path]) -> str:
    """Makes a path absolute, from the likelier of two folders, unless that changes its meaning.

    Of ``model.path`` the existing folder, else the text as it is (a name on the Hub) unless it is
    plainly a path; of ``data.*`` the existing file, else as it is where it may be a name on the
    Hub, else where it should have been; ``output.dir`` from the first folder if it begins with
    ``./`` or ``../``, else as it is.
    """
    if key == "data.chat_template" and (
        value in BUILT_IN_CHAT_TEMPLATES or is_inline_template(value)
    ):
        return value
    expanded = os.path.expanduser(value) if value.startswith("~") else value  # noqa: PTH111
    plainly_path = Path(expanded).is_absolute() or expanded.replace("\\", "/").startswith(
        ("./", "../")
    )
    if key == "output.dir":
        return _absolute(bases[0], expanded) if plainly_path else expanded
    for base in bases:
        if _exists(base / expanded):
            return _absolute(base, expanded)
    if key == "model.path" and not plainly_path:
        return value
    if key in ("data.train", "data.eval"):
        place = DataPlace.parse(expanded)
        for base in bases if place.path else ():
            if _exists(base / place.path):
                return _absolute(base, place.path) + place.ending
        if not plainly_path and _NAME_ON_HUB.fullmatch(place.path):
            return value
    return _absolute(bases[0], expanded)


def _absolute(base: Path, value: str) -> str:
    # normpath, not resolve: a link to a data set keeps the name that the user gave it.
    return os.path.normpath(Path.cwd() / base / value)


def _exists(path: Path) -> bool:
    try:
        return exists(path)
    except (OSError, ValueError):  # too long a name, or a NUL in it
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
        self.metrics = self.path / "metrics.jsonl"  # its log: rows of steps and evaluations
        self.samples = self.path / "samples.jsonl"  # what the model has written
        self.progress = self.path / "progress.json"  # how far it is to go, and who runs it
        self.report = self.path / "report.html"  # its page
        self.result = self.path / "result.json"  # what it has come to, once it has ended
        self.plot = self.path / "loss.png"  # a picture of its losses
        self.tensorboard = self.path / "tensorboard"  # folder of TensorBoard's files
        self.wandb_id = self.path / "wandb-id.txt"  # under which id Weights & Biases knows it
        self.replaced = self.path / "replaced"  # folder of a run that this one is to replace
        self.lock = self.path / ".lock"  # held by who writes it

    @property
    def needed(self) -> tuple[Path, ...]:
        """What a run is or goes on from; where one of them is, there is a run."""
        return self.adapter, self.best, self.checkpoints, self.metrics, self.config

    @property
    def written(self) -> tuple[Path, ...]:
        """All that a run writes for itself and for who looks at it."""
        shown = self.samples, self.progress, self.report, self.result, self.plot
        return *self.needed, *shown, self.tensorboard, self.wandb_id

    @property
    def is_run(self) -> bool:
        """Whether it is a run's folder: with its settings, and the log that it begins with."""
        return is_file(self.config) and is_file(self.metrics)

    @property
    def kept_run(self) -> Path | None:
        """Where the run is that this one is to replace, until it has something to show."""
        return self.replaced if exists(self.replaced) else None


def run_around(adapter: Path) -> Path:
    """The folder that a run would have to which an adapter, or a checkpoint, belongs."""
    parent = adapter.parent
    return parent.parent if parent.name == CHECKPOINTS else parent
