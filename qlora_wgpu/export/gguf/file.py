"""Writing a GGUF file, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.export.gguf.tensors import FileTensor
from qlora_wgpu.export.room import MARGIN, refuse_without_room

_ALIGNMENT = 32
_ARRAYS = {"u": "UINT", "i": "INT", "f": "FLOAT"}


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Sequence[FileTensor],
    progress: Callable[[str], None],
) -> None:
    """Writes a file; not atomic.

    Args:
        path: The file.
        architecture: llama.cpp's name of it.
        keys: The metadata, by whole keys.
        tensors: The tensors, in the file's order.
        progress: Called with each tensor's name before it is written.

    Raises:
        CheckpointError: If it cannot be written, or the disk has no room.
    """
    import gguf  # takes its time, for those alone who need it

    check_room(path, tensors)
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType(tensor.kind.number)
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind
        )
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        _pad(file, file.tell())
        for tensor in tensors:
            progress(tensor.name)
            begin = file.tell()
            for part in tensor.parts:
                for raw in part():
                    file.write(raw.data)
            if file.tell() - begin != tensor.nbytes:
                raise CheckpointError(
                    f"{tensor.name} became {file.tell() - begin} bytes, not {tensor.nbytes}"
                )
            _pad(file, tensor.nbytes)


def check_room(path: Path, tensors: Sequence[FileTensor]) -> None:
    """Makes sure that the disk has room for a file.

    Args:
        path: The file.
        tensors: Its tensors.

    Raises:
        CheckpointError: If it has none.
    """
    needed = sum(tensor.nbytes + _ALIGNMENT for tensor in tensors) + MARGIN
    advice = "name another place with --gguf, or a smaller --type"
    refuse_without_room(path.parent, needed, "the file", advice)


def _pad(file: Any, size: int) -> None:
    file.write(bytes(-size % _ALIGNMENT))


def _add(writer: Any, key: str, value: Any) -> None:
    """Adds a value of the type that llama.cpp reads for it: whole numbers are uint32."""
    import gguf

    if isinstance(value, np.ndarray) and not value.size:
        return  # as gguf leaves out lists of nothing
    if isinstance(value, np.ndarray):
        width = 8 * value.dtype.itemsize
        name = "BOOL" if value.dtype.kind == "b" else f"{_ARRAYS[value.dtype.kind]}{width}"
        array, kind = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[name]
        writer.add_key_value(key, value.tolist(), array, sub_type=kind)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if value < 0:
            writer.add_int32(key, value)
        elif value < 1 << 32:
            writer.add_uint32(key, value)
        else:
            writer.add_uint64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
