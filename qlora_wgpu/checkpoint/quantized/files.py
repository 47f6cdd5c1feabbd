"""The interface of a folder's reader of quantized weights, whoever quantized them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.safetensors_file import FLOATS, TORCH_NAMES, SafetensorsFile
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import QuantizedWeight, WeightFormat

STORED_AS = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


class QuantizedFiles(ABC):
    """Weights ``X.weight`` whose codes and companions are tensors ``X.…`` of safetensors files.

    Attributes:
        codes_leaf: The last part of the name of the tensor with the codes.
        companions: The last parts of the names of those that belong to it.
    """

    codes_leaf = "weight"
    companions: tuple[str, ...] = ()

    def __init__(self, files: Mapping[str, SafetensorsFile], config: Mapping[str, Any]) -> None:
        """Notes where tensors are."""
        self._files = files
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
        self._dtype = dtype if dtype in TORCH_NAMES.values() else "bfloat16"

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether a weight is there and quantized."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, int]:
        """(out_features, in_features) of a weight that it holds."""

    @abstractmethod
    def format(self, name: str) -> WeightFormat | None:
        """The form of a weight that it holds; None where no kernel has it."""

    @abstractmethod
    def read(self, name: str) -> QuantizedWeight:
        """A weight that it holds, in the form that ``format`` says."""

    def is_mapped(self, name: str) -> bool:
        """Whether a weight that it holds is in its file nearly as the device takes it."""
        return False

    def read_mapped(self, name: str) -> QuantizedWeight:
        """Such a weight, its large arrays read-only views of the file; errors as for ``read``."""
        return self.read(name)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """What a weight that it holds stands for; errors as for ``read``."""
        return self.read(name).dequantize()

    @property
    def notes(self) -> tuple[str, ...]:
        """What config.json asks for beside quantized weights and is not done, for the user."""
        return ()

    def float_dtype(self, name: str) -> str:
        """The type of a weight that it holds before it was quantized, by safetensors' name."""
        return STORED_AS[self._dtype]

    def stored(self, name: str) -> str:
        """The tensor with the codes of a weight."""
        return f"{name.removesuffix('.weight')}.{self.codes_leaf}"

    def weight_of(self, tensor: str) -> str:
        """The weight whose codes a tensor holds, or the tensor's own name."""
        stem, _, leaf = tensor.rpartition(".")
        name = f"{stem}.weight"
        return name if leaf == self.codes_leaf and self.holds(name) else tensor

    def is_companion(self, tensor: str) -> bool:
        """Whether a tensor only belongs to a quantized weight."""
        stem, _, leaf = tensor.rpartition(".")
        return leaf in self.companions and self.holds(f"{stem}.weight")

    @property
    def any(self) -> bool:
        """Whether it holds any weight."""
        return any(self.holds(self.weight_of(name)) for name in self._files)

    # -- for subclasses ------------------------------------------------------------------------

    def _matrix(self, name: str, leaf: str) -> tuple[int, int]:
        """The shape of a tensor of rows and columns."""
        shape = self._shape_of(name, leaf)
        if len(shape) != 2:
            raise self._wrong(self._name(name, leaf), f"has shape {shape}, which is no matrix's")
        return shape[0], shape[1]

    def _has(self, name: str, leaf: str) -> bool:
        return self._name(name, leaf) in self._files

    def _name(self, name: str, leaf: str) -> str:
        return f"{name.removesuffix('.weight')}.{leaf}"

    def _dtype_of(self, name: str, leaf: str) -> str:
        tensor = self._name(name, leaf)
        return self._files[tensor].dtype(tensor)

    def _shape_of(self, name: str, leaf: str) -> tuple[int, ...]:
        tensor = self._found(name, leaf)
        return self._files[tensor].shape(tensor)

    def _found(self, name: str, leaf: str) -> str:
        """A tensor's name."""
        tensor = self._name(name, leaf)
        if tensor not in self._files:
            file = self._files[self.stored(name)]
            raise CheckpointError(
                f"{file.path}: {self.stored(name)!r} is quantized, but {tensor!r} is missing"
            )
        return tensor

    def _raw(
        self, name: str, leaf: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]:
        """A tensor's elements as stored."""
        tensor = self._found(name, leaf)
        file = self._files[tensor]
        if file.dtype(tensor) not in dtypes:
            raise self._wrong(tensor, f"has dtype {file.dtype(tensor)}, not {' or '.join(dtypes)}")
        if shape is not None and file.shape(tensor) != shape:
            raise self._wrong(
                tensor, f"has shape {file.shape(tensor)}, but its weight asks for {shape}"
            )
        return file.raw(tensor)

    def _floats(
        self, name: str, leaf: str, shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[np.float32]:
        """A tensor of finite numbers as float32; errors as for ``_raw``."""
        self._raw(name, leaf, FLOATS, shape)
        tensor = self._name(name, leaf)
        numbers = self._files[tensor].float32(tensor)
        if not np.isfinite(numbers).all():
            raise self._wrong(tensor, "holds NaN or infinity, so the model is damaged")
        return numbers

    def _wrong(self, tensor: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._files[tensor].path}: {tensor!r} {what}")
