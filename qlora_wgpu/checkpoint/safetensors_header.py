"""The header of a safetensors file, as the safetensors library reads it.

A file that the library refuses is refused here, and one that it takes is taken, within the limits
of ``limits.py``: two readers that differ would make of one file two models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from qlora_wgpu.checkpoint.safetensors_damage import damage
from qlora_wgpu.errors import brief
from qlora_wgpu.limits import DIMENSIONS, TENSORS


class HeaderError(Exception):
    """What is wrong with a header, as the end of a sentence that starts with the file's name."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's type, shape and place in the file.

    Attributes:
        dtype: The format's name of the element type, for example "BF16".
        shape: The tensor's dimensions.
        begin: First byte, counted from the end of the header.
        end: Byte after its last.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(
    path: Path, raw: bytes, data_bytes: int
) -> tuple[dict[str, TensorEntry], Mapping[str, str]]:
    """Reads and checks a header.

    Args:
        path: A regular file.
        raw: Its header.
        data_bytes: Bytes that follow the header.

    Returns:
        The tensors by name, in the order of the header, and the metadata.

    Raises:
        HeaderError: If the library refuses the file, or it is beyond the limits.
    """
    with _refusals(raw, data_bytes), safe_open(path, framework="numpy") as file:
        names, metadata = set(file.keys()), file.metadata() or {}
    if len(names) > TENSORS:
        raise HeaderError(f"lists {len(names)} tensors, more than the {TENSORS} allowed")
    entries = _entries(raw)
    last = max((entry.end for entry in entries.values()), default=0)
    if entries.keys() != names or last != data_bytes:
        raise HeaderError("has changed while it was read: try again")
    return entries, metadata


def _entries(raw: bytes) -> dict[str, TensorEntry]:
    """What a header says that the library has checked, but of which it does not tell all."""
    try:
        header = json.loads(raw)
    except ValueError as err:  # an integer of more digits than Python reads, where none is needed
        raise HeaderError(f"has a header that is not read: {err}") from err
    header.pop("__metadata__", None)
    return {name: _entry(name, value) for name, value in header.items()}


def _entry(name: str, value: Any) -> TensorEntry:
    keys = ("dtype", "shape", "data_offsets")
    dtype, shape, (begin, end) = value if isinstance(value, list) else [value[k] for k in keys]
    if len(shape) > DIMENSIONS:
        raise HeaderError(
            f"has shape {brief(shape)} for tensor {brief(name)}: more than {DIMENSIONS} dimensions "
            "are not allowed"
        )
    if isinstance(dtype, dict):  # {"F32": null}, which the library takes for "F32"
        (dtype,) = dtype
    return TensorEntry(dtype, tuple(shape), begin, end)


@contextmanager
def _refusals(raw: bytes, data_bytes: int) -> Iterator[None]:
    """Turns what the library raises into a sentence that says where the damage is."""
    try:
        yield
    except HeaderError:
        raise
    except BaseException as err:
        # A panic of the library is no Exception; an interrupt must stay one.
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        reason = damage(raw, data_bytes) or f"is damaged: {' '.join(str(err).split())[:300]}"
        raise HeaderError(reason) from err
