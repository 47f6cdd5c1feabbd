"""What a reward model's or classifier's scores mean, in the metadata of an adapter's file."""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import get_args

from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import is_file
from qlora_wgpu.lora.peft_files import CONFIG, WEIGHTS
from qlora_wgpu.ops.score import ProblemType, Scoring

SCORING = "scoring"
"""The key of a file's metadata."""
_KEPT = ("objective", "problem_type", "labels")


def is_scored_adapter(folder: str | PathLike[str]) -> bool:
    """Whether a folder has an adapter of a reward model or classifier."""
    path = Path(folder).expanduser() / CONFIG
    return is_file(path) and read_json_object(path).get("task_type") == "SEQ_CLS"


def default_scoring(classes: int) -> Scoring:
    """The meaning of an adapter's scores if its file does not say."""
    return Scoring("reward" if classes == 1 else "classification", classes)


def to_metadata(scoring: Scoring) -> dict[str, str]:
    """The meaning of scores as a file's metadata."""
    values = asdict(scoring)
    return {SCORING: json.dumps({key: values[key] for key in _KEPT})}


def read_scoring(folder: str | PathLike[str], classes: int) -> Scoring:
    """The meaning of an adapter's scores.

    Raises:
        CheckpointError: If the metadata is damaged or does not fit the number of classes.
    """
    path = Path(folder).expanduser() / WEIGHTS
    with SafetensorsFile(path) as file:
        text = file.metadata.get(SCORING)
    if text is None:
        return default_scoring(classes)
    try:
        told = json.loads(text)
        objective, problem, labels = (told[key] for key in _KEPT)
        labels = tuple(map(str, labels))
        is_known = objective in ("reward", "classification") and problem in get_args(ProblemType)
        if not is_known or (labels and len(labels) != classes):
            raise ValueError(text)
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path}: the metadata {SCORING} is damaged") from err
    return Scoring(objective, classes, problem, labels=labels)
