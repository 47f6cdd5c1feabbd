"""The header of a safetensors file, checked in full before any tensor is touched.

Format: 8 bytes header length (little-endian), a JSON object, then the tensors' bytes. Every byte of
the data belongs to exactly one tensor. The checks are those of the reference implementation and
some it leaves out (duplicate names, a bound on memory), because a checkpoint is a foreign file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.checkpoint.safetensors_format import BITS

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 100_000
_MAX_DIMENSIONS = 32  # NumPy's limit before version 2


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


def parse_header(raw: bytes, data_bytes: int) -> tuple[dict[str, TensorEntry], Mapping[str, str]]:
    """Parses and checks a header.

    Args:
        raw: The JSON text.
        data_bytes: Bytes that follow it in the file.

    Returns:
        The tensors by name, in the order of the header, and the metadata.

    Raises:
        HeaderError: If anything is wrong with it.
    """
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as err:
        raise HeaderError(f"is damaged: its header is not UTF-8 at byte {8 + err.start}") from err
    except (RecursionError, ValueError) as err:
        raise HeaderError(f"is damaged: its header is not JSON ({err})") from err
    if not isinstance(header, dict):
        raise HeaderError("is damaged: its header is no JSON object")
    metadata = _metadata(header.pop("__metadata__", {}))
    if len(header) > MAX_TENSORS:
        raise HeaderError(f"lists {len(header)} tensors, more than the {MAX_TENSORS} allowed")
    entries = {name: _entry(name, value) for name, value in header.items()}
    _check_cover(entries, data_bytes, 8 + len(raw))
    return entries, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise HeaderError(f"is damaged: its header lists {twice!r} twice")
    return result


def _metadata(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise HeaderError("is damaged: its metadata is no map of strings")
    return value


def _entry(name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(
            f"is damaged: tensor {name!r} must have dtype, shape and data_offsets, and only these"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise HeaderError(f"has tensor {name!r} of unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise HeaderError(f"is damaged: tensor {name!r} has shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"is damaged: tensor {name!r} has data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    bits = BITS[dtype]
    for size in shape:
        bits *= size
    if bits != 8 * (end - begin):
        raise HeaderError(
            f"is damaged: tensor {name!r}, {dtype} {shape}, needs {-(-bits // 8)} bytes, but its "
            f"data_offsets give it {end - begin}"
        )
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of integers from 0 to 2^63 - 1; ``True`` is no integer here."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _check_cover(entries: Mapping[str, TensorEntry], data_bytes: int, header_bytes: int) -> None:
    """Every byte belongs to exactly one tensor."""
    reached = 0
    last = ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < reached:
            raise HeaderError(f"is damaged: tensors {last!r} and {name!r} overlap")
        if entry.begin > reached:
            raise HeaderError(
                f"is damaged: {entry.begin - reached} bytes before tensor {name!r} belong to none"
            )
        reached, last = entry.end, name
    if reached > data_bytes:
        raise HeaderError(
            f"is truncated: its header says {header_bytes + reached} bytes, the file has "
            f"{header_bytes + data_bytes}; download or copy it again"
        )
    if reached < data_bytes:
        raise HeaderError(f"is damaged: its last {data_bytes - reached} bytes belong to no tensor")
