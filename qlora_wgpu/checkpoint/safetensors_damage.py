"""What is wrong with the header of a safetensors file, in words that say where.

Format: 8 bytes header length (little-endian), a JSON object, then the tensors' bytes. Every byte of
the data belongs to exactly one tensor. ``safetensors_header.py`` decides whether a file is refused;
this module looks for the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.checkpoint.safetensors_format import BITS
from qlora_wgpu.errors import brief


class _DamageError(Exception):
    pass


@dataclass(frozen=True)
class _Place:
    begin: int
    end: int


def damage(raw: bytes, data_bytes: int) -> str | None:
    """What is wrong, as the end of a sentence that starts with the file's name.

    Args:
        raw: The header's JSON text.
        data_bytes: Bytes that follow it in the file.

    Returns:
        The reason, or None where nothing is seen.
    """
    try:
        _check(raw, data_bytes)
    except _DamageError as err:
        return str(err)
    return None


def _check(raw: bytes, data_bytes: int) -> None:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as err:
        raise _DamageError(f"is damaged: its header is not UTF-8 at byte {8 + err.start}") from err
    except (RecursionError, ValueError) as err:
        raise _DamageError(f"is damaged: its header is not JSON ({err})") from err
    if not isinstance(header, dict):
        raise _DamageError("is damaged: its header is no JSON object")
    _check_metadata(header.pop("__metadata__", None))
    places = {name: _place(name, value) for name, value in header.items()}
    _check_cover(places, data_bytes, 8 + len(raw))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _DamageError(f"is damaged: its header lists {brief(twice)} twice")
    return result


def _check_metadata(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise _DamageError("is damaged: its metadata is no map of strings")


def _place(name: str, value: Any) -> _Place:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise _DamageError(
            f"is damaged: tensor {brief(name)} must have dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _DamageError(f"has tensor {brief(name)} of unknown dtype {brief(dtype)}")
    if not _are_sizes(shape):
        raise _DamageError(f"is damaged: tensor {brief(name)} has shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _DamageError(f"is damaged: tensor {brief(name)} has data_offsets {str(offsets)[:80]}")
    _check_size(name, dtype, shape, offsets[1] - offsets[0])
    return _Place(*offsets)


def _check_size(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
    bits = BITS[dtype]
    for size in shape:
        bits = min(bits * size, 2**80)  # a list of large numbers has no end otherwise
    if bits != 8 * nbytes:
        raise _DamageError(
            f"is damaged: tensor {brief(name)}, {dtype} {brief(shape)}, needs {-(-bits // 8)} "
            f"bytes, but its data_offsets give it {nbytes}"
        )


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of integers from 0 to 2^63 - 1; ``True`` is no integer here."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _check_cover(places: Mapping[str, _Place], data_bytes: int, header_bytes: int) -> None:
    """Every byte belongs to exactly one tensor."""
    reached = 0
    last = ""
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin < reached:
            raise _DamageError(f"is damaged: tensors {brief(last)} and {brief(name)} overlap")
        if place.begin > reached:
            raise _DamageError(
                f"is damaged: {place.begin - reached} bytes before tensor {brief(name)} belong to "
                "none"
            )
        reached, last = place.end, name
    if reached > data_bytes:
        raise _DamageError(
            f"is truncated: its header says {header_bytes + reached} bytes, the file has "
            f"{header_bytes + data_bytes}; download or copy it again"
        )
    if reached < data_bytes:
        raise _DamageError(f"is damaged: its last {data_bytes - reached} bytes belong to no tensor")
