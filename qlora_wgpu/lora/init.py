"""Initial values of A and B, PEFT's ``init_lora_weights``: random, or parts of the base."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.flat_vector import FlatVector
from qlora_wgpu.lora.peft_files import WEIGHTS
from qlora_wgpu.lora.peft_names import (
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    RANK_AXIS,
    WHOLE,
    Float32Array,
    parse_name,
    tensor_name,
)

# ---- drawn -----------------------------------------------------------------------------------


def draw_start(
    flat: FlatVector,
    values: Float32Array,
    targets: Sequence[LinearSpec],
    embedding: LinearSpec | None,
    seed: int,
    *,
    gaussian: bool,
) -> None:
    """Draws PEFT's initial values: A uniform in ±1/√in_features (Kaiming, a = √5) or normal, B 0.

    For an embedding, A is zero and B standard normal. Each matrix has its own random stream, so its
    values do not depend on what else is adapted.
    """
    for spec in targets:
        name = tensor_name(spec.name, LORA_A)
        place, stream = flat[name], _stream(seed, name)
        if gaussian:
            place.view(values)[:] = stream.normal(0.0, 1 / place.rows, place.shape)
        else:
            bound = 1 / np.sqrt(place.columns)
            place.view(values)[:] = stream.uniform(-bound, bound, place.shape)
    if embedding is not None:
        name = tensor_name(embedding.name, EMBEDDING_B)
        flat[name].view(values)[:] = _stream(seed, name).standard_normal(flat[name].shape)


def draw_head(flat: FlatVector, values: Float32Array, module: str, std: float, seed: int) -> None:
    """Draws a new head's rows as transformers initializes linear layers."""
    name = tensor_name(module, WHOLE)
    drawn = _stream(seed, name).standard_normal(flat[name].shape)
    flat[name].view(values)[:] = std * drawn


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))


# ---- parts of the base -----------------------------------------------------------------------

_NITER = re.compile(r"pissa_niter_(\d+)")
_ELEMENTS = 1 << 22  # of a product that are in float64 at a time


def pair_of(
    name: str, weight: Float32Array, kind: str, r: int, scaling: float, seed: int
) -> tuple[Float32Array, Float32Array]:
    """A (r, in_features) and B (out_features, r) of a layer, as parts of its weight.

    Training starts from the weight's largest singular directions (PiSSA, arXiv 2404.02948) or its
    first orthogonal ones (OLoRA, arXiv 2406.01775). The base keeps the rest (``rest_of``), so the
    model is unchanged. Computed on the host, in float32 as in PEFT. ``kind`` is ``pissa``,
    ``olora`` or ``pissa_niter_N``, whose random numbers depend on the layer's name.
    """
    if kind == "olora":
        # The first columns of Q depend on those of the weight alone, and R's rows are Qᵀ·W.
        q, _ = np.linalg.qr(weight[:, :r])
        return np.ascontiguousarray(q.T @ weight), np.ascontiguousarray(q)
    if match := _NITER.fullmatch(kind):
        u, s, vt = _svd_lowrank(weight, r, int(match[1]), _stream(seed, name))
    else:
        u, s, vt = (part.astype(np.float32) for part in np.linalg.svd(weight, full_matrices=False))
    root = np.sqrt(s[:r] / np.float32(scaling))
    return np.ascontiguousarray(root[:, None] * vt[:r]), np.ascontiguousarray(u[:, :r] * root)


def rest_of(weight: Float32Array, a: Float32Array, b: Float32Array, scaling: float) -> Float32Array:
    """W - scaling · B·A, each sum rounded once, so that it does not depend on their order."""
    rest = np.empty_like(weight)
    step = max(_ELEMENTS // weight.shape[1], 1)
    wide = scaling * a.astype(np.float64)
    for begin in range(0, len(weight), step):
        rows = slice(begin, begin + step)
        rest[rows] = weight[rows] - b[rows].astype(np.float64) @ wide
    return rest


def _svd_lowrank(
    weight: Float32Array, r: int, niter: int, random: np.random.Generator
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Approximate U (out, r), S (r) and Vᵀ (r, in) of the r largest singular values.

    Halko et al. (2009), algorithm 5.1, as in PyTorch.
    """
    is_wide = weight.shape[0] < weight.shape[1]
    matrix = weight.T if is_wide else weight
    basis = random.standard_normal((matrix.shape[1], r), dtype=np.float32)
    q, _ = np.linalg.qr(matrix @ basis)
    for _ in range(niter):
        q, _ = np.linalg.qr(matrix.T @ q)
        q, _ = np.linalg.qr(matrix @ q)
    u, s, vt = np.linalg.svd(q.T @ matrix, full_matrices=False)
    u = q @ u
    return (vt.T, s, u.T) if is_wide else (u, s, vt)


# ---- conversion to plain LoRA ----------------------------------------------------------------

STARTED = "init_lora_weights"
"""The key of a file's metadata with the adapter's initialization and its training settings."""

_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")

Tensors = dict[str, Float32Array]


@dataclass(frozen=True)
class InitialAdapter:
    """An adapter that was initialized as a part of its base."""

    kind: str  # PEFT's ``init_lora_weights``
    tensors: Tensors  # by PEFT's names
    start: Tensors  # the same before training
    config: AdapterConfig


def converted(started: InitialAdapter) -> tuple[Tensors, AdapterConfig, dict[str, str]]:
    """Tensors, settings and metadata of an adapter as plain LoRA on the original base.

    Trained on W - s·B₀·A₀, it has changed the model by s·(B·A - B₀·A₀): a pair [A; A₀], [B, -B₀] of
    twice the rank, whose second half is the initial one, as PEFT's conversion writes it
    (``path_initial_model_for_weight_conversion``).
    """
    tensors: Tensors = {}
    for name, array in started.tensors.items():
        axis, first = RANK_AXIS[_leaf(name)], started.start[name]
        tensors[name] = np.concatenate([array, -first if axis else first], axis)
    config = started.config
    factor = math.sqrt(2) if config.use_rslora else 2
    origin = {"kind": started.kind, **{key: getattr(config, key) for key in _SETTINGS}}
    plain = replace(
        config,
        r=2 * config.r,
        lora_alpha=factor * config.lora_alpha,
        rank_pattern={key: 2 * rank for key, rank in config.rank_pattern.items()},
        alpha_pattern={key: factor * alpha for key, alpha in config.alpha_pattern.items()},
    )
    return tensors, plain, {STARTED: json.dumps(origin)}


def started_in(
    folder: str | PathLike[str], tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> InitialAdapter | None:
    """The adapter that ``converted`` wrote; None for any other."""
    path = Path(folder).expanduser() / WEIGHTS
    with SafetensorsFile(path) as file:
        text = file.metadata.get(STARTED)
    if text is None:
        return None
    try:
        origin: dict[str, Any] = json.loads(text)
        own = replace(config, **{key: origin[key] for key in _SETTINGS})
        kind = str(origin["kind"])
    except (ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path}: the metadata {STARTED} is damaged") from err
    now: Tensors = {}
    start: Tensors = {}
    for name, array in tensors.items():
        leaf = _leaf(name)
        axis = RANK_AXIS.get(leaf, 0)
        if leaf not in (LORA_A, LORA_B) or array.shape[axis] % 2:
            raise CheckpointError(f"{path}: {name!r} does not consist of two halves")
        first, second = np.split(array, 2, axis)
        now[name], start[name] = map(np.ascontiguousarray, (first, -second if axis else second))
    return InitialAdapter(kind, now, start, own)


def _leaf(name: str) -> str:
    parsed = parse_name(name)
    return "" if parsed is None else parsed[1]
