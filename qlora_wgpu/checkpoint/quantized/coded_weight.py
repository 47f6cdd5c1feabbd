"""Quantized weights as codes and companion tensors, such as scales, in safetensors files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.safetensors_file import FLOATS, TORCH_NAMES
from qlora_wgpu.checkpoint.stored_weight import Files, FloatArray, StoredWeight
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import QuantizedWeight

STORED_AS = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)


class CodedWeight(StoredWeight):
    """A weight ``X.weight`` whose codes and companions are tensors ``X.…``."""

    is_quantized = True
    codes_leaf = "weight"  # the last part of the codes' tensor name
    codes_types: tuple[str, ...] = ()  # their possible dtypes
    companions: tuple[str, ...] = ()  # the last parts of companions' names; the first is required

    def __init__(self, files: Files, name: str, torch_dtype: str) -> None:
        """Reads nothing, and the weight may be missing: see ``exists``."""
        self.name, self.torch_dtype = name, torch_dtype
        self._files, self._stem = files, name.removesuffix(".weight")
        self.tensor = self._leaf(self.codes_leaf)

    @property
    def exists(self) -> bool:
        """Whether the files have the weight's codes and scales."""
        file = self._files.get(self.tensor) if self.name.endswith(".weight") else None
        is_codes = file is not None and file.dtype(self.tensor) in self.codes_types
        return is_codes and self._has(self.companions[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._matrix(self.codes_leaf)

    @abstractmethod
    def quantized(self) -> QuantizedWeight | None:
        """Codes and scales; None if ``format`` is None."""

    @property
    def path(self) -> Path:
        """The file of its codes."""
        return self._files[self.tensor].path

    @property
    def dtype(self) -> str:
        """The dtype before quantization."""
        return STORED_AS[self.torch_dtype]

    @property
    def stored_dtype(self) -> str:
        """The dtype of the codes."""
        return self._files[self.tensor].dtype(self.tensor)

    def raw(self) -> npt.NDArray[Any]:
        """The codes as stored."""
        return self._files[self.tensor].raw(self.tensor)

    def read(self) -> FloatArray:
        """The dequantized weight."""
        weight = self.quantized()
        return self._dequantize_act_order() if weight is None else weight.dequantize()

    def owns(self, tensor: str) -> bool:
        """Whether a tensor is a companion of the weight."""
        leaf = tensor.rpartition(".")[2]
        return tensor != self.tensor and leaf in (*self.companions, *_ACTIVATIONS)

    # -- for subclasses ------------------------------------------------------------------------

    def _dequantize_act_order(self) -> FloatArray:
        """The dequantized weight, if the columns of a group are not contiguous."""
        raise NotImplementedError

    def _group_of_columns(self, leaf: str, size: int) -> npt.NDArray[np.int32] | None:
        """The group of each column; None if groups are contiguous."""
        if not self._has(leaf):
            return None
        columns = self.shape[1]
        order = self._raw(leaf, ("I32", "I64"), (columns,)).astype(np.int32)
        if (order == np.arange(columns) // size).all():
            return None
        if not ((order >= 0) & (order < -(-columns // size))).all():
            raise self._error(leaf, "refers to groups that do not exist")
        return order

    def _leaf(self, leaf: str) -> str:
        return f"{self._stem}.{leaf}"

    def _has(self, leaf: str) -> bool:
        return self._leaf(leaf) in self._files

    def _dtype_of(self, leaf: str) -> str:
        tensor = self._leaf(leaf)
        return self._files[tensor].dtype(tensor)

    def _shape_of(self, leaf: str) -> tuple[int, ...]:
        tensor = self._found(leaf)
        return self._files[tensor].shape(tensor)

    def _matrix(self, leaf: str) -> tuple[int, int]:
        shape = self._shape_of(leaf)
        if len(shape) != 2:
            raise self._error(leaf, f"must be a matrix, got shape {shape}")
        return shape[0], shape[1]

    def _found(self, leaf: str) -> str:
        """The name of a tensor that must exist."""
        tensor = self._leaf(leaf)
        if tensor not in self._files:
            raise CheckpointError(
                f"{self.path}: {self.tensor!r} is quantized, but {tensor!r} is missing"
            )
        return tensor

    def _raw(
        self, leaf: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]:
        tensor = self._found(leaf)
        file = self._files[tensor]
        if file.dtype(tensor) not in dtypes:
            raise self._error(
                leaf, f"must have dtype {' or '.join(dtypes)}, got {file.dtype(tensor)}"
            )
        if shape is not None and file.shape(tensor) != shape:
            raise self._error(leaf, f"must have shape {shape}, got {file.shape(tensor)}")
        return file.raw(tensor)

    def _floats(self, leaf: str, shape: tuple[int, ...] | None = None) -> FloatArray:
        """A tensor of finite floats as float32."""
        self._raw(leaf, FLOATS, shape)
        tensor = self._leaf(leaf)
        numbers = self._files[tensor].float32(tensor)
        if not np.isfinite(numbers).all():
            raise self._error(leaf, "contains NaN or infinity: the model is damaged")
        return numbers

    def _error(self, leaf: str, what: str) -> CheckpointError:
        tensor = self._leaf(leaf)
        return CheckpointError(f"{self._files[tensor].path}: {tensor!r} {what}")


class QuantizedFiles:
    """The quantized weights of a folder, each of one of several kinds."""

    def __init__(
        self,
        files: Files,
        config: Mapping[str, Any],
        *kinds: Callable[[Files, str, str], CodedWeight],
        notes: tuple[str, ...] = (),  # what quantization_config requires and is ignored
        unused: tuple[str, ...] = (),  # endings of tensors' names that are ignored
    ) -> None:
        """``kinds`` are constructors of handles, from files, a name and PyTorch's dtype."""
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
        self._dtype = dtype if dtype in STORED_AS else "bfloat16"
        self._files, self._kinds, self.unused, self.notes = files, kinds, unused, notes

    def find(self, name: str) -> CodedWeight | None:
        """A quantized weight by its name."""
        weights = (kind(self._files, name, self._dtype) for kind in self._kinds)
        return next((weight for weight in weights if weight.exists), None)

    def owner(self, tensor: str) -> CodedWeight | None:
        """The quantized weight that a tensor belongs to."""
        stem, dot, _ = tensor.partition(".weight.")
        names = tensor, f"{stem if dot else tensor.rpartition('.')[0]}.weight"
        found = (weight for name in names if (weight := self.find(name)) is not None)
        return next((w for w in found if tensor == w.tensor or w.owns(tensor)), None)
