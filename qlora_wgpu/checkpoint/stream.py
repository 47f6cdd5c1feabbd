"""Writing a safetensors file tensor by tensor, so that memory holds one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.atomic import final_name
from qlora_wgpu.checkpoint.safetensors_format import BITS, METADATA
from qlora_wgpu.errors import CheckpointError, reason


@dataclass(frozen=True)
class Entry:
    """A tensor's element type by the format's name, and its dimensions."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * BITS[self.dtype] // 8


def write_stream(
    path: Path, entries: Mapping[str, Entry], data: Callable[[str], npt.NDArray[Any]]
) -> None:
    """Writes a file that transformers opens.

    Args:
        path: The file; not atomic, so write into a folder that is not finished yet.
        entries: Type and shape of each tensor, by name.
        data: Gives a tensor's bytes, in an array of any type.

    Raises:
        CheckpointError: If it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, entry in entries.items():
                raw = np.ascontiguousarray(data(name)).view(np.uint8).reshape(-1)
                if raw.size != entry.nbytes:
                    raise ValueError(f"{name} has {raw.size} bytes, not {entry.nbytes}")
                file.write(raw.data)
    except OSError as err:
        raise CheckpointError(f"{final_name(path)} cannot be written: {reason(err)}") from err
