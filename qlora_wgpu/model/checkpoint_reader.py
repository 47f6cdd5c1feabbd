"""Reads weights from a model's files by module name, in the device's form."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.stored_weight import StoredWeight
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.graph.tensor import (
    LARGEST_FLOAT16,
    ROW_UNIT,
    matrix,
    pad_rows,
    stored_bits,
    stored_floats,
)
from qlora_wgpu.lora.init import rest_of
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B
from qlora_wgpu.ops.trained import TrainableTokens
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4

# ---- names -----------------------------------------------------------------------------------


def stored_name(folder: ModelFolder, architecture: Architecture, name: str) -> str:
    return with_prefixes(folder, architecture.stored_prefixes, name)


def with_prefixes(folder: ModelFolder, prefixes: Sequence[tuple[str, str]], name: str) -> str:
    """The name, with its prefix replaced by that of the files if they have another one."""
    if name not in folder:
        for own, other in prefixes:
            if name.startswith(own) and other + name.removeprefix(own) in folder:
                return other + name.removeprefix(own)
    return name


def stored_embedding(folder: ModelFolder | None, architecture: Architecture) -> str:
    """The name of the embedding's tensor, which may be the head's if they are tied."""
    name, head_name = architecture.embed_name, architecture.head_name
    if folder is None or architecture.classes:
        return name
    has_head = stored_name(folder, architecture, head_name) in folder
    if stored_name(folder, architecture, name) in folder:
        if not has_head and not architecture.tied:
            raise CheckpointError(
                f"{folder.path}: the tensor {head_name!r} is missing, and {name} cannot replace it "
                "because config.json does not set tie_word_embeddings to true"
            )
        return name
    if not has_head:
        return name
    if not architecture.tied:
        raise CheckpointError(
            f"{folder.path}: the tensor {name} is missing, and {head_name} cannot replace it "
            "because config.json does not set tie_word_embeddings to true"
        )
    return head_name


# ---- weights ---------------------------------------------------------------------------------


@dataclass
class Requantization:
    """Quantizes weights to NF4 and measures how much they change."""

    count: int = 0  # weights so far
    moved: float = 0.0  # sum of the squared changes
    whole: float = 0.0  # sum of the squared weights

    def since(self, before: Requantization) -> Requantization:
        return Requantization(
            self.count - before.count, self.moved - before.moved, self.whole - before.whole
        )

    def add(self, other: Requantization) -> None:
        self.count += other.count
        self.moved += other.moved
        self.whole += other.whole

    def quantize(self, weight: npt.NDArray[np.float32], quant: QuantConfig) -> QuantizedWeight:
        quantized = quantize_nf4(weight, quant.blocksize, quant.double_quant)
        difference = (quantized.dequantize() - weight).reshape(-1)
        self.count += 1
        self.moved += float(np.dot(difference, difference))
        self.whole += float(np.dot(weight.reshape(-1), weight.reshape(-1)))
        return quantized

    @property
    def relative_rms(self) -> float:
        """Root mean square of all changes, relative to that of the weights."""
        return math.sqrt(self.moved / self.whole) if self.whole else 0.0

    def warn(self) -> None:
        if self.count:
            warnings.warn(
                f"{self.count} linear layers are stored in a format that no kernel supports and "
                f"were quantized again to NF4, which changed their weights by "
                f"{100 * self.relative_rms:.2g} % (relative RMS): this adapter belongs to NF4 "
                "weights",
                stacklevel=2,
            )
            self.count = 0


FloatArray = npt.NDArray[np.float32]


class CheckpointReader:
    """The files of a model, or none for a plan."""

    def __init__(self, folder: ModelFolder | None, quant: QuantConfig) -> None:
        self.folder = folder
        self.prefixes: tuple[tuple[str, str], ...] = ()  # of names here and in the files
        # Rows in the files of matrices that get more rows; the new ones start as their mean.
        self.stored_rows: dict[str, int] = {}
        self.requantization = Requantization()
        self._quant = quant
        self.changed: frozenset[str] = frozenset()  # weights that an adapter takes a part of
        self._parts: dict[str, tuple[FloatArray, FloatArray, float]] = {}
        self._parts_hash = ""

    def remove_initial_adapter(self, adapter: AdapterLayout) -> None:
        """From now on, weights are read without the initial part of an adapter."""
        assert adapter.start is not None
        for spec in adapter.targets:
            a, b = (adapter.place(spec.name, leaf).view(adapter.start) for leaf in (LORA_A, LORA_B))
            stored = self.stored(f"{spec.name}.weight")
            self._parts[stored] = a, b, adapter.peft.scaling_of(spec.name)
        self._parts_hash = hashlib.sha256(adapter.start.data).hexdigest()

    def stored(self, name: str) -> str:
        return name if self.folder is None else with_prefixes(self.folder, self.prefixes, name)

    def find(self, name: str) -> StoredWeight | None:
        return None if self.folder is None else self.folder.find(self.stored(name))

    def read(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """A tensor in float32, whose shape is checked."""
        folder, stored, rows = self._folder, self.stored(name), self.stored_rows.get(name)
        missing = 0 if rows is None else max(shape[0] - rows, 0)
        own = (shape[0] - missing, *shape[1:]) if missing else shape
        array = folder[stored].read()
        _check_shape(folder, stored, array.shape, own)
        if stored in self._parts:
            array = rest_of(array, *self._parts[stored])
        if missing:
            array = np.concatenate([array, np.tile(mean_row(array), (missing, 1))])
        return array

    def is_as_stored(self, name: str, columns: int, dtype: str) -> bool:
        """Whether a file has a matrix in the device's form."""
        return (
            name not in self.stored_rows
            and name not in self.changed
            and dtype == "bfloat16"
            and columns % ROW_UNIT == 0
            and (weight := self.find(name)) is not None
            and weight.is_bfloat16
        )

    def loading_bytes(self, name: str, rows: int, columns: int, dtype: str) -> int:
        """Bytes of host memory that ``read_bits`` takes temporarily."""
        if self.is_as_stored(name, columns, dtype):
            return 0
        nbytes = rows * matrix("", 1, columns, dtype).nbytes
        read = 4 * rows * columns
        more = read if name in self.stored_rows else 0  # its own rows in addition to the whole
        taken_as_read = dtype == "float32" and columns % ROW_UNIT == 0
        return read + max(0 if taken_as_read else nbytes, more)

    def read_bits(self, name: str, shape: tuple[int, int], dtype: str) -> npt.NDArray[Any]:
        """A matrix in the device's form, without a copy if its file has that form."""
        if self.is_as_stored(name, shape[1], dtype):
            bits = self._folder[self.stored(name)].bfloat16()
            _check_shape(self._folder, name, bits.shape, shape)
            return bits
        return bits_of(name, self.read(name, shape), dtype)

    def quantized(self, name: str, shape: tuple[int, int]) -> QuantizedWeight:
        stored = self._folder[self.stored(name)]
        quantized = stored.quantized()
        if quantized is not None:
            _check_shape(self._folder, stored.name, quantized.shape, shape)
            return quantized
        weight = self.read(name, shape)
        if stored.must_requantize:
            return self.requantization.quantize(weight, self._quant)
        return quantize_nf4(weight, self._quant.blocksize, self._quant.double_quant)

    def refuse_bias(self, layer: str) -> None:
        if self.folder is not None and self.find(f"{layer}.bias") is not None:
            raise CheckpointError(
                f"{self.folder.path}: the weights contain {layer}.bias, but config.json says that "
                "this layer has no bias"
            )

    def made_from(self, dtype: str) -> Any:
        """Everything that decides the bytes of layers quantized here; None if that is unknown."""
        identity = None if self.folder is None else self.folder.identity
        if identity is None:
            return None
        parts = [self._parts_hash] if self._parts else []
        return [identity, self._quant.model_dump(), dtype, *parts]

    @property
    def _folder(self) -> ModelFolder:
        assert self.folder is not None
        return self.folder


def mean_row(matrix: FloatArray) -> FloatArray:
    mean: FloatArray = matrix.mean(axis=0, dtype=np.float64).astype(np.float32)
    return mean


def bits_of(name: str, array: FloatArray, dtype: str) -> npt.NDArray[Any]:
    """A matrix in an element type, its rows padded."""
    if dtype == "float16" and (np.isfinite(array) & (np.abs(array) > LARGEST_FLOAT16)).any():
        raise CheckpointError(
            f"{name} contains weights that are too large for matrix units "
            f"(at most {LARGEST_FLOAT16:,.0f} in float16): use "
            "train.compute_dtype: float32 or device.backend: wgpu"
        )
    return stored_bits(pad_rows(array), dtype)


def keep_originals(
    trained: TrainableTokens | None, bits: npt.NDArray[Any], columns: int, dtype: str
) -> None:
    if trained is not None:
        own = np.ascontiguousarray(bits[list(trained.indices)])
        floats = stored_floats(own.data.cast("B"), dtype).reshape(len(own), -1)
        trained.originals = floats[:, :columns].astype(np.float32)


def _check_shape(
    folder: ModelFolder, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if tuple(shape) != expected:
        raise CheckpointError(
            f"{folder.path}: {name} has shape {tuple(shape)}, expected {expected} by config.json"
        )
