"""Safetensors files tensor by tensor: the library's bytes, without a copy of all of them.

The library itself copies every tensor and then the whole file; an adapter's moments alone may be
gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.atomic import final_name, write_pieces
from qlora_wgpu.checkpoint.safetensors_file import BITS, METADATA, NUMPY_DTYPES
from qlora_wgpu.errors import CheckpointError, reason

# The library's order: the largest elements first, so that each tensor is aligned.
_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E4M3", "F8_E5M2",
    "I8", "U8", "BOOL",
)  # fmt: skip
_OWN_TYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_NAMES = {np.dtype(_OWN_TYPES.get(name, NUMPY_DTYPES.get(name))): name for name in _ORDER}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor's element type by the format's name, and its dimensions."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * BITS[self.dtype] // 8


def write_safetensors(
    path: str | PathLike[str],
    tensors: Mapping[str, npt.NDArray[np.generic]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors as a safetensors file, atomically, without a copy of them all.

    Args:
        path: The file.
        tensors: Arrays by name, which may be views of others.
        metadata: Strings to store beside them; {"format": "pt"} if None, without which
            transformers refuses a model's file.
    """
    entries = {n: Entry(_NAMES[np.asarray(a).dtype], np.shape(a)) for n, a in tensors.items()}
    ordered = sorted(entries, key=lambda name: (_ORDER.index(entries[name].dtype), name))
    header = _header({name: entries[name] for name in ordered}, metadata or METADATA)
    arrays = (np.ascontiguousarray(tensors[name]).reshape(-1) for name in ordered)
    write_pieces(path, chain([header], (array.view(np.uint8).data for array in arrays)))


def write_stream(
    path: Path, entries: Mapping[str, Entry], data: Callable[[str], npt.NDArray[Any]]
) -> None:
    """Writes a file that transformers opens; not atomic. ``data`` gives a tensor's bytes."""
    try:
        with path.open("wb") as file:
            file.write(_header(entries, METADATA))
            for name, entry in entries.items():
                raw = np.ascontiguousarray(data(name)).view(np.uint8).reshape(-1)
                if raw.size != entry.nbytes:
                    raise ValueError(f"{name} has {raw.size} bytes, not {entry.nbytes}")
                file.write(raw.data)
    except OSError as err:
        raise CheckpointError(f"{final_name(path)} cannot be written: {reason(err)}") from err


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
