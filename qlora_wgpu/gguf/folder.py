"""A GGUF file in the place of a Hugging Face folder: its weights, and the files of its text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.expert_stacks import IN_TURNS
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.header import FLOATS, QUANTIZED, ElementType
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import WEIGHTS, nearest
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint, identity, state_of
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import built_in_family
from qlora_wgpu.gguf.architectures import find_architecture
from qlora_wgpu.gguf.config import read_config
from qlora_wgpu.gguf.keys import Keys
from qlora_wgpu.gguf.placements import Placement, placements
from qlora_wgpu.gguf.text_files import text_folder
from qlora_wgpu.quant import GGML_FORMATS, QuantizedWeight, repack_ggml
from qlora_wgpu.weight_format import WeightFormat

_AT_ONCE = 1 << 22  # elements that become floats at once
_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
_Bytes = npt.NDArray[np.uint8]


class GGUFFolder(ModelFolder):
    """An opened GGUF file: its header is read and checked, a weight is read when asked for.

    Attributes:
        path: The file, or the first of a split model's.
        config: What config.json would say.
        file: The open file.
        placements: Where each tensor lies in it, by Hugging Face's names.
        on_read: Called with the name of each tensor that is about to be read.
    """

    tells_shapes = True
    on_read: Callable[[str], None] | None = None

    def __init__(self, file: GGUFFile) -> None:
        """Takes an open file."""
        config = read_config(file)
        super().__init__(file.path, config, {})
        self.file = file
        llama_cpp = find_architecture(Keys(file.metadata, file.path))
        family = built_in_family(config["model_type"])
        assert family is not None
        self.placements = placements(file, llama_cpp, family.read(config), config)
        self._read_last: str | None = None

    @classmethod
    def of_path(cls, path: Path) -> GGUFFolder:
        """Opens a file; any part of a split model names all; errors as for the constructor."""
        return cls(GGUFFile(path))

    @cached_property
    def text_folder(self) -> Path:
        """The folder with config.json and the tokenizer's files, made of the file's header."""
        return text_folder(self.file, self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is stored quantized."""
        return any(self._is_quantized(name) for name in self.placements)

    @property
    def parts_stacks(self) -> bool:
        """Whether experts are by themselves here, which Hugging Face's files hold together."""
        return self.config.get("model_type") in IN_TURNS

    def names(self) -> list[str]:
        """All tensors, by Hugging Face's names."""
        return list(self.placements)

    def files(self) -> dict[str, list[str]]:
        """All tensors in one file, as a folder that is made of this one has them."""
        return {WEIGHTS: self.names()}

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.placements

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, such as "F16" or "Q4_K"."""
        return self.type(name).name

    def float_dtype(self, name: str) -> str:
        """The type of floats that a tensor becomes."""
        kind = self.type(name)
        return kind.name if kind.is_float else "BF16"

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions, whatever it is stored as."""
        return self._placement(name).shape

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """``shape``."""
        return self.shape(name)

    def type(self, name: str) -> ElementType:
        """What a tensor is stored as; of one that is made of several floats' float32."""
        placement = self._placement(name)
        kinds = [self._kind(leaf) for leaf in placement.leaves]
        packed = [kind for kind in kinds if not kind.is_float]
        return packed[0] if packed else FLOATS[0] if placement.change else kinds[0]

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor of floats as stored; bfloat16 as uint16."""
        kind, placement = self.type(name), self._placement(name)
        is_made = bool(placement.offset) or placement.change is not None
        if is_made and kind.name == "F32":
            return self._float32(name)
        if kind.name not in _NUMPY or is_made:
            raise CheckpointError(f"{self.path}: {name} is not stored as floats")
        rows = np.ascontiguousarray(self.rows(name))
        return rows.view(_NUMPY[kind.name]).reshape(self.shape(name))

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, quantized ones as llama.cpp reads them."""
        return self._checked(name, self._float32(name), self.path)

    def stored_bytes(self, name: str) -> _Bytes:
        """A tensor's bytes as a view of the file, its rows in the file's order."""
        return _joined([self._rows_of(p).reshape(-1) for p in self._placement(name).leaves])

    def rows(self, name: str) -> _Bytes:
        """(rows, bytes of a row): a tensor's bytes, its rows in Hugging Face's order.

        A view of the file where that is the file's order, too.
        """
        self._tell(name)
        placement = self._placement(name)
        stored = [self._rows_of(leaf) for leaf in placement.leaves]
        rows, order = _joined(stored), placement.order
        rows = rows if order is None else rows[order]
        if placement.columns is None:
            return rows
        kind, width = self.type(name), placement.columns.width
        return placement.columns.of(rows, width // kind.block * kind.nbytes)

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """``float32``, which takes all."""
        return self.float32(name)

    def quantized(self, name: str, *, mapped: bool = False) -> QuantizedWeight | None:
        """A matrix as it is stored; None of floats and of types that no kernel reads."""
        if self.weight_format(name) is None:
            return None
        shape, rows = self.shape(name), np.ascontiguousarray(self.rows(name)).reshape(-1)
        where = f"{self.path}: {name}"
        return repack_ggml(self.dtype(name), rows, (shape[0], shape[1]), where)

    def weight_format(self, name: str) -> WeightFormat | None:
        """The format of ``quantized(name)``, without reading it."""
        placement, kind = self._placement(name), self.type(name)
        stored, columns = GGML_FORMATS.get(kind.name), placement.columns
        is_whole = columns is None or columns.width % kind.block == 0
        keeps_bits = placement.change is None and is_whole  # in whatever order
        is_matrix = len(placement.shape) == 2 and keeps_bits
        return stored.form if stored is not None and is_matrix else None

    def holds_quantized(self, name: str) -> bool:
        """Whether a weight is there and quantized."""
        return self.has(name) and self._is_quantized(name)

    def must_requantize(self, name: str) -> bool:
        """Whether a weight is of a type that no kernel has; ``float32`` gives it."""
        return self.holds_quantized(name) and self.weight_format(name) is None

    def weight_of(self, tensor: str) -> str:
        """The tensor's own name."""
        return tensor

    def is_companion(self, tensor: str) -> bool:
        """No: blocks hold their scales."""
        return False

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read from now on, so that ``fingerprint`` costs little."""
        if self._fingerprint is None:
            self._fingerprint = WeightFingerprint(dict.fromkeys(self.names(), self))

    @cached_property
    def identity(self) -> str | None:
        """``ModelFolder.identity``, of all parts and their headers."""
        about = [self.file.header_digest, *map(state_of, self.file.paths)]
        return identity([self], json.dumps([self.config, about], sort_keys=True))

    def _is_quantized(self, name: str) -> bool:
        return self.type(name).number in QUANTIZED

    def _placement(self, name: str) -> Placement:
        if name not in self.placements:
            raise CheckpointError(
                f"{self.path}: the file has no tensor for {name!r}{nearest(name, self.names())}"
            )
        return self.placements[name]

    def _float32(self, name: str) -> npt.NDArray[np.float32]:
        placement = self._placement(name)
        self._tell(name)
        if placement.change is None:
            return self._floats(placement)
        sources = [self._floats(source) for source in placement.leaves]
        with np.errstate(all="ignore"):  # as below
            made = placement.change.make(sources)
        return np.ascontiguousarray(made, np.float32).reshape(placement.shape)

    def _floats(self, placement: Placement) -> npt.NDArray[np.float32]:
        parts = []
        for leaf in placement.leaves:
            kind = self._kind(leaf)
            if kind.number not in FLOATS and kind.number not in QUANTIZED:
                raise CheckpointError(
                    f"{self.path}: {leaf.stored} is stored as {kind.name}, which is not read as "
                    "weights: take the model in another quantization"
                )
            parts.append((self._rows_of(leaf), kind))
        order, first = placement.order, 0
        columns = parts[0][0].shape[1] // parts[0][1].nbytes * parts[0][1].block
        result = np.empty((sum(len(rows) for rows, _ in parts), columns), np.float32)
        with np.errstate(all="ignore"):  # whoever reads looks for what is not finite
            for rows, kind in parts:
                for some in _cut(rows, columns):
                    result[first : first + len(some)] = to_float32(some, kind)
                    first += len(some)
            if order is not None:
                result = result[order]
            if placement.columns is not None:
                result = placement.columns.of(result, placement.columns.width)
            if placement.offset:
                result -= np.float32(placement.offset)
        return result.reshape(placement.shape)

    def _tell(self, name: str) -> None:
        if self._read_last is not None:  # one at a time in memory
            for leaf in self.placements[self._read_last].leaves:
                self.file.tensor(leaf.stored).release()
        self._read_last = name
        if self.on_read is not None:
            self.on_read(name)

    def _kind(self, placement: Placement) -> ElementType:
        return self.file.tensor(placement.stored).place.type

    def _rows_of(self, placement: Placement) -> _Bytes:
        stored = self.file.tensor(placement.stored)
        if placement.order is not None and len(placement.shape) == 1:
            # A bias, whose order is of elements.
            return stored.data.reshape(len(stored.data) // self._kind(placement).nbytes, -1)
        count = math.prod(placement.shape[:-1])
        return stored.rows[placement.first_row : placement.first_row + count]


def _joined(parts: list[_Bytes]) -> _Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cut(rows: _Bytes, columns: int) -> Iterator[_Bytes]:
    """Some rows at a time."""
    step = max(_AT_ONCE // columns, 1)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def to_float32(rows: _Bytes, kind: ElementType) -> npt.NDArray[np.float32]:
    """Rows of a type's blocks as float32 numbers (rows, columns)."""
    rows = np.ascontiguousarray(rows)
    if kind.name == "BF16":
        return from_bfloat16(rows.view("<u2"))
    if kind.is_float:
        return rows.view(_NUMPY[kind.name]).astype(np.float32)
    import gguf  # takes its time, for those alone who need it

    floats: npt.NDArray[np.float32] = gguf.quants.dequantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return floats
