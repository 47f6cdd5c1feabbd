"""The types that weights are written in, and the bytes that they become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.checkpoint.gguf.element_types import TYPES, ElementType
from qlora_wgpu.errors import ConfigError, UnsupportedModelError

_BY_NAME = {kind.name: kind for kind in TYPES.values()}
F32, F16, BF16, Q8_0 = (_BY_NAME[name] for name in ("F32", "F16", "BF16", "Q8_0"))
_LARGEST = 65504.0  # of float16, which scales of blocks are, too
_AT_ONCE = 1 << 22  # numbers that become blocks at once


@dataclass(frozen=True)
class FileType:
    """What most of a file's matrices are stored as.

    Attributes:
        kind: The element type.
        number: ``general.file_type``, by which llama.cpp shows the file.
    """

    kind: ElementType
    number: int


FILE_TYPES = {
    "f32": FileType(F32, 0),
    "f16": FileType(F16, 1),
    "bf16": FileType(BF16, 32),
    "q8_0": FileType(Q8_0, 7),
    "q5_1": FileType(_BY_NAME["Q5_1"], 9),
    "q5_0": FileType(_BY_NAME["Q5_0"], 8),
    "q4_1": FileType(_BY_NAME["Q4_1"], 3),
    "q4_0": FileType(_BY_NAME["Q4_0"], 2),
}
"""By the names that ``--type`` takes."""


def find_file_type(name: str) -> FileType:
    """A file type by its name.

    Raises:
        ConfigError: If it is none that is written; of llama.cpp's others, says what makes them.
    """
    found = FILE_TYPES.get(name.lower())
    if found is not None:
        return found
    known = ", ".join(FILE_TYPES)
    if name.lower().startswith(("q", "iq", "tq", "mxfp", "nvfp")):
        raise ConfigError(
            f"--type {name} is not written here (written: {known}): write f16 or bf16, and let "
            f"llama.cpp's own tool make it of that: llama-quantize model.gguf smaller.gguf "
            f"{name.upper()}"
        )
    raise ConfigError(f"--type {name!r} is not a type of GGUF files (written: {known})")


def type_within(wanted: ElementType, shape: tuple[int, ...], *, is_head: bool) -> ElementType:
    """What a matrix is stored as in a file of a type.

    Args:
        wanted: The file's type.
        shape: The matrix's shape.
        is_head: Whether the logits are its product, which blocks of few bits would tell on.
    """
    if shape[-1] % wanted.block:
        return F16  # as llama.cpp's converter has it: rows are no whole blocks
    if is_head and not wanted.is_float and wanted.nbytes * 8 < Q8_0.nbytes * 8:
        return Q8_0
    return wanted


def as_bytes(
    array: npt.NDArray[np.float32], kind: ElementType, name: str
) -> Iterator[npt.NDArray[np.uint8]]:
    """A tensor's bytes, some rows at a time.

    Args:
        array: The tensor.
        kind: What it is stored as.
        name: Its name, for messages.

    Raises:
        UnsupportedModelError: If a number is larger than the type has.
    """
    largest = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    if kind.name not in ("F32", "BF16") and not largest <= _LARGEST:
        raise UnsupportedModelError(
            f"{name} holds {largest:.3g}, which {kind.name.lower()} does not: write bf16 or f32"
        )
    rows = np.ascontiguousarray(array).reshape(-1, array.shape[-1] if array.ndim else 1)
    step = max(_AT_ONCE // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        yield _encoded(rows[first : first + step], kind)


def _encoded(rows: npt.NDArray[np.float32], kind: ElementType) -> npt.NDArray[np.uint8]:
    if kind == F32:
        return rows.astype("<f4", copy=False).view(np.uint8)
    if kind == F16:
        return rows.astype("<f2").view(np.uint8)
    if kind == BF16:
        return to_bfloat16(rows).view(np.uint8)
    import gguf  # takes its time, for those alone who need it

    blocks: npt.NDArray[np.uint8] = gguf.quants.quantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return np.ascontiguousarray(blocks)
