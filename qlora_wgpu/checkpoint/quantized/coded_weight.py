"""Weights whose codes and companions are tensors of safetensors files, whoever quantized them."""

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

    codes_leaf = "weight"  # how the name of the codes' tensor ends
    codes_types: tuple[str, ...] = ()  # that it may have
    companions: tuple[str, ...] = ()  # how others end that belong to it; the first one always does

    def __init__(self, files: Files, name: str, torch_dtype: str) -> None:
        """Looks at nothing: first ask whether it ``is_there``, whose type of floats is said."""
        self.name, self.torch_dtype = name, torch_dtype
        self._files, self._stem = files, name.removesuffix(".weight")
        self.tensor = self._leaf(self.codes_leaf)

    @property
    def is_there(self) -> bool:
        """Whether the files hold such a weight of that name: its codes, and scales."""
        file = self._files.get(self.tensor) if self.name.endswith(".weight") else None
        is_codes = file is not None and file.dtype(self.tensor) in self.codes_types
        return is_codes and self._has(self.companions[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self._matrix(self.codes_leaf)

    @abstractmethod
    def quantized(self) -> QuantizedWeight | None:
        """Codes and scales; None where ``format`` is None."""

    @property
    def is_quantized(self) -> bool:
        """Yes."""
        return True

    @property
    def path(self) -> Path:
        """The file of its codes."""
        return self._files[self.tensor].path

    @property
    def dtype(self) -> str:
        """The type of its floats before."""
        return STORED_AS[self.torch_dtype]

    @property
    def stored_dtype(self) -> str:
        """The type of the codes' tensor."""
        return self._files[self.tensor].dtype(self.tensor)

    def raw(self) -> npt.NDArray[Any]:
        """The codes' tensor."""
        return self._files[self.tensor].raw(self.tensor)

    def read(self) -> FloatArray:
        """What it stands for."""
        weight = self.quantized()
        return self._shuffled() if weight is None else weight.dequantize()

    def owns(self, tensor: str) -> bool:
        """Whether a tensor beside the codes only belongs to it."""
        leaf = tensor.rpartition(".")[2]
        return tensor != self.tensor and leaf in (*self.companions, *_ACTIVATIONS)

    # -- for subclasses ------------------------------------------------------------------------

    def _shuffled(self) -> FloatArray:
        """What one stands for whose columns are in an order that no kernel has."""
        raise NotImplementedError

    def _group_of_columns(self, leaf: str, size: int) -> npt.NDArray[np.int32] | None:
        """The group of each column, if groups of so many columns are no neighbours."""
        if not self._has(leaf):
            return None
        columns = self.shape[1]
        order = self._raw(leaf, ("I32", "I64"), (columns,)).astype(np.int32)
        if (order == np.arange(columns) // size).all():
            return None
        if not ((order >= 0) & (order < -(-columns // size))).all():
            raise self._wrong(leaf, "names groups that are not there")
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
        """The shape of a tensor of rows and columns."""
        shape = self._shape_of(leaf)
        if len(shape) != 2:
            raise self._wrong(leaf, f"has shape {shape}, which is no matrix's")
        return shape[0], shape[1]

    def _found(self, leaf: str) -> str:
        """A tensor's name."""
        tensor = self._leaf(leaf)
        if tensor not in self._files:
            raise CheckpointError(
                f"{self.path}: {self.tensor!r} is quantized, but {tensor!r} is missing"
            )
        return tensor

    def _raw(
        self, leaf: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]:
        """A tensor's elements as stored."""
        tensor = self._found(leaf)
        file = self._files[tensor]
        if file.dtype(tensor) not in dtypes:
            raise self._wrong(leaf, f"has dtype {file.dtype(tensor)}, not {' or '.join(dtypes)}")
        if shape is not None and file.shape(tensor) != shape:
            raise self._wrong(
                leaf, f"has shape {file.shape(tensor)}, but its weight asks for {shape}"
            )
        return file.raw(tensor)

    def _floats(self, leaf: str, shape: tuple[int, ...] | None = None) -> FloatArray:
        """A tensor of finite numbers as float32; errors as for ``_raw``."""
        self._raw(leaf, FLOATS, shape)
        tensor = self._leaf(leaf)
        numbers = self._files[tensor].float32(tensor)
        if not np.isfinite(numbers).all():
            raise self._wrong(leaf, "holds NaN or infinity, so the model is damaged")
        return numbers

    def _wrong(self, leaf: str, what: str) -> CheckpointError:
        tensor = self._leaf(leaf)
        return CheckpointError(f"{self._files[tensor].path}: {tensor!r} {what}")


class QuantizedFiles:
    """The quantized weights of a folder, each in one of the ways in which it stores them."""

    def __init__(
        self,
        files: Files,
        config: Mapping[str, Any],
        *ways: Callable[[Files, str, str], CodedWeight],
        notes: tuple[str, ...] = (),  # what is asked for besides and not done, for the user
        unused: tuple[str, ...] = (),  # how the names of tensors end that nothing here reads
    ) -> None:
        """Takes what makes weights' handles, of files, a name and the type of floats."""
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
        self._dtype = dtype if dtype in STORED_AS else "bfloat16"
        self._files, self._ways, self.unused, self.notes = files, ways, unused, notes

    def find(self, name: str) -> CodedWeight | None:
        """A quantized weight by its name."""
        weights = (way(self._files, name, self._dtype) for way in self._ways)
        return next((weight for weight in weights if weight.is_there), None)

    def owner(self, tensor: str) -> CodedWeight | None:
        """The quantized weight whose codes a tensor holds, or to which it belongs."""
        stem, dot, _ = tensor.partition(".weight.")
        names = tensor, f"{stem if dot else tensor.rpartition('.')[0]}.weight"
        found = (weight for name in names if (weight := self.find(name)) is not None)
        return next((w for w in found if tensor == w.tensor or w.owns(tensor)), None)
