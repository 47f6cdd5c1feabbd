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
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.header import FLOATS, QUANTIZED, ElementType
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import WEIGHTS
from qlora_wgpu.checkpoint.stored_weight import IN_TURNS, FloatArray, StoredWeight
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint, identity, state_of
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import built_in_family
from qlora_wgpu.gguf.architectures import find_architecture
from qlora_wgpu.gguf.config import read_config
from qlora_wgpu.gguf.keys import Keys
from qlora_wgpu.gguf.placements import TensorMapping, tensor_map
from qlora_wgpu.gguf.text_files import text_folder
from qlora_wgpu.mapped_files import let_go
from qlora_wgpu.quant import GGML_FORMATS, QuantizedWeight, repack_ggml
from qlora_wgpu.weight_format import WeightFormat

_AT_ONCE = 1 << 22  # elements that become floats at once
_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
_Bytes = npt.NDArray[np.uint8]


class GGUFWeight(StoredWeight):
    """A weight of Hugging Face's, wherever a GGUF file has it."""

    def __init__(self, folder: GGUFFolder, name: str, placement: TensorMapping) -> None:
        """Takes the folder that it is a weight of, and where it lies there."""
        self.name, self.placement = name, placement
        self._folder = folder

    @property
    def path(self) -> Path:
        """The model's, or the first of its parts."""
        return self._folder.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own, whatever it is stored as."""
        return self.placement.shape

    @cached_property
    def type(self) -> ElementType:
        """What it is stored as; of one that is made of several floats' float32."""
        kinds = [self._folder.kind(leaf) for leaf in self.placement.leaves]
        packed = [kind for kind in kinds if not kind.is_float]
        return packed[0] if packed else FLOATS[0] if self.placement.change else kinds[0]

    @property
    def dtype(self) -> str:
        """The type of floats that it becomes."""
        return self.type.name if self.type.is_float else "BF16"

    @property
    def stored_dtype(self) -> str:
        """llama.cpp's name of its type."""
        return self.type.name

    @property
    def is_quantized(self) -> bool:
        """Whether it is of blocks that become floats."""
        return self.type.number in QUANTIZED

    @property
    def format(self) -> WeightFormat | None:
        """What a matrix's blocks become, whatever the order of its rows; None of floats."""
        placement, stored = self.placement, GGML_FORMATS.get(self.type.name)
        columns = placement.columns
        is_whole = columns is None or columns.width % self.type.block == 0
        is_matrix = len(placement.shape) == 2 and placement.change is None and is_whole
        return stored.form if stored is not None and is_matrix else None

    def quantized(self) -> QuantizedWeight | None:
        """A matrix's blocks, repacked; None of floats and of types that no kernel reads."""
        if self.format is None:
            return None
        rows = np.ascontiguousarray(self.rows()).reshape(-1)
        shape = self.shape[0], self.shape[1]
        return repack_ggml(self.type.name, rows, shape, f"{self.path}: {self.name}")

    def raw(self) -> npt.NDArray[Any]:
        """The floats as stored; bfloat16 as uint16."""
        is_made = bool(self.placement.offset) or self.placement.change is not None
        if is_made and self.type.name == "F32":
            return self._float32()
        if self.type.name not in _NUMPY or is_made:
            raise CheckpointError(f"{self.path}: {self.name} is not stored as floats")
        rows = np.ascontiguousarray(self.rows())
        return rows.view(_NUMPY[self.type.name]).reshape(self.shape)

    def read(self) -> FloatArray:
        """As float32, blocks as llama.cpp reads them."""
        return self._finite(self._float32())

    def rows(self) -> _Bytes:
        """(rows, bytes of a row): its bytes, its rows in Hugging Face's order.

        A view of the file where that is the file's order, too.
        """
        self._folder.about_to_read(self.name)
        placement = self.placement
        rows = _joined([self._folder.rows_of(leaf) for leaf in placement.leaves])
        rows = rows if placement.order is None else rows[placement.order]
        if placement.columns is None:
            return rows
        width = placement.columns.width // self.type.block * self.type.nbytes
        return placement.columns.of(rows, width)

    def _float32(self) -> FloatArray:
        placement = self.placement
        self._folder.about_to_read(self.name)
        if placement.change is None:
            return self._floats(placement)
        sources = [self._floats(source) for source in placement.leaves]
        with np.errstate(all="ignore"):  # as below
            made = placement.change.make(sources)
        return np.ascontiguousarray(made, np.float32).reshape(placement.shape)

    def _floats(self, placement: TensorMapping) -> FloatArray:
        parts = []
        for leaf in placement.leaves:
            kind = self._folder.kind(leaf)
            if kind.number not in FLOATS and kind.number not in QUANTIZED:
                raise CheckpointError(
                    f"{self.path}: {leaf.stored} is stored as {kind.name}, which is not read as "
                    "weights: take the model in another quantization"
                )
            parts.append((self._folder.rows_of(leaf), kind))
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


class GGUFFolder(ModelFolder):
    """An opened GGUF file: its header is read and checked, a weight is read when asked for.

    Attributes:
        path: The file, or the first of a split model's.
        config: What config.json would say.
        file: The open file.
        placements: Where each tensor lies in it, by Hugging Face's names.
        on_read: Called with the name of each tensor that is about to be read.
    """

    on_read: Callable[[str], None] | None = None
    _missing = "the file has no tensor for"

    def __init__(self, file: GGUFFile) -> None:
        """Takes an open file."""
        self.file = file
        super().__init__(file.path, read_config(file), {})
        llama_cpp = find_architecture(Keys(file.metadata, file.path))
        family = built_in_family(self.config["model_type"])
        assert family is not None
        architecture = family.read(self.config)
        self.placements = tensor_map(file, llama_cpp, architecture, self.config)
        self._read_last: str | None = None

    @cached_property
    def text_folder(self) -> Path:
        """The folder with config.json and the tokenizer's files, made of the file's header."""
        return text_folder(self.file, self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is stored quantized."""
        return any(self[name].is_quantized for name in self.placements)

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

    def find(self, name: str) -> GGUFWeight | None:
        """A weight by its name."""
        placement = self.placements.get(name)
        return None if placement is None else GGUFWeight(self, name, placement)

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read from now on, so that ``fingerprint`` costs little."""
        if self._fingerprint is None:
            self._fingerprint = WeightFingerprint(dict.fromkeys(self.names(), self))

    @cached_property
    def identity(self) -> str | None:
        """``ModelFolder.identity``, of all parts and their headers."""
        about = [self.file.header_digest, *map(state_of, self.file.paths)]
        return identity([self], json.dumps([self.config, about], sort_keys=True))

    # -- what is hashed --------------------------------------------------------------------------

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, such as "F16" or "Q4_K"."""
        return self[name].stored_dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self.placements[name].shape

    def stored_bytes(self, name: str) -> _Bytes:
        """A tensor's bytes as a view of the file, its rows in the file's order."""
        return _joined([self.rows_of(p).reshape(-1) for p in self.placements[name].leaves])

    # -- for its weights -------------------------------------------------------------------------

    def about_to_read(self, name: str) -> None:
        """Lets go of what was read last, so that one at a time is in memory."""
        if self._read_last is not None:
            for leaf in self.placements[self._read_last].leaves:
                let_go(self.file.tensor(leaf.stored).data)
        self._read_last = name
        if self.on_read is not None:
            self.on_read(name)

    def kind(self, placement: TensorMapping) -> ElementType:
        """The type of a tensor of the file."""
        return self.file.tensor(placement.stored).place.type

    def rows_of(self, placement: TensorMapping) -> _Bytes:
        """(rows, bytes of a row) of a tensor of the file; of a bias's order elements are rows."""
        stored = self.file.tensor(placement.stored)
        if placement.order is not None and len(placement.shape) == 1:
            return stored.data.reshape(len(stored.data) // self.kind(placement).nbytes, -1)
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
