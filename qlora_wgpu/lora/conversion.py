"""Adapters that began as parts of the base, as plain LoRA of twice the rank, and back again.

Of W_rest = W - s·B₀·A₀ with s·B·A, s·(B·A - B₀·A₀) is what was learnt: a pair [A; A₀], [B, -B₀] on
the original base. PEFT writes it so under ``path_initial_model_for_weight_conversion``. The second
half of it is the start, so that the file knows all that was trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.names import LORA_A, LORA_B, Float32Array, parse_name
from qlora_wgpu.lora.peft_files import WEIGHTS

STARTED = "init_lora_weights"
"""Under which a file's metadata say how its adapter began, and the settings it was trained with."""

_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")

Tensors = dict[str, Float32Array]


@dataclass(frozen=True)
class Started:
    """An adapter that began as a part of its base.

    Attributes:
        kind: PEFT's ``init_lora_weights``.
        tensors: What it is, by PEFT's names.
        start: What it was, likewise.
        config: Its settings.
    """

    kind: str
    tensors: Tensors
    start: Tensors
    config: AdapterConfig


def converted(started: Started) -> tuple[Tensors, AdapterConfig, dict[str, str]]:
    """An adapter as plain LoRA: its tensors, its settings, and metadata for its file."""
    tensors: Tensors = {}
    for name, array in started.tensors.items():
        is_a = _leaf(name) == LORA_A
        first = started.start[name]
        tensors[name] = np.concatenate([array, first if is_a else -first], axis=0 if is_a else 1)
    config = started.config
    factor = math.sqrt(2) if config.use_rslora else 2
    told = {"kind": started.kind, **{key: getattr(config, key) for key in _SETTINGS}}
    plain = replace(
        config,
        r=2 * config.r,
        lora_alpha=factor * config.lora_alpha,
        rank_pattern={key: 2 * rank for key, rank in config.rank_pattern.items()},
        alpha_pattern={key: factor * alpha for key, alpha in config.alpha_pattern.items()},
    )
    return tensors, plain, {STARTED: json.dumps(told)}


def started_in(
    folder: str | PathLike[str], tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> Started | None:
    """What ``converted`` put together; None of an adapter that began otherwise.

    Args:
        folder: The adapter's folder.
        tensors: Its tensors, without biases.
        config: Its settings, as its file has them.

    Raises:
        CheckpointError: If they do not fit what the metadata say.
    """
    path = Path(folder).expanduser() / WEIGHTS
    with SafetensorsFile(path) as file:
        text = file.metadata.get(STARTED)
    if text is None:
        return None
    try:
        told: dict[str, Any] = json.loads(text)
        own = replace(config, **{key: told[key] for key in _SETTINGS})
        kind = str(told["kind"])
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path}: its metadata {STARTED} are damaged") from err
    now: Tensors = {}
    start: Tensors = {}
    for name, array in tensors.items():
        leaf = _leaf(name)
        half = array.shape[0 if leaf == LORA_A else 1] // 2
        parts = (
            (array[:half], array[half:]) if leaf == LORA_A else (array[:, :half], -array[:, half:])
        )
        if leaf not in (LORA_A, LORA_B) or parts[0].shape != parts[1].shape:
            raise CheckpointError(f"{path}: {name!r} is no pair of two halves")
        now[name], start[name] = (np.ascontiguousarray(part) for part in parts)
    return Started(kind, now, start, own)


def _leaf(name: str) -> str:
    parsed = parse_name(name)
    return "" if parsed is None else parsed[1]
