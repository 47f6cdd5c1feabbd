"""A weight as a model's files hold it: one handle, whatever the format and whoever quantized it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import has_nonfinite
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.mapped_files import pieces
from qlora_wgpu.quant import QuantizedWeight, WeightFormat

Files = Mapping[str, SafetensorsFile]
"""Which open file holds which tensor."""
FloatArray = npt.NDArray[np.float32]

_PIECE = 1 << 22  # numbers that are looked at a time


class StoredWeight(ABC):
    """A weight in a model's files. Headers say what it is; its bytes are read when asked for.

    Attributes:
        name: Hugging Face's name of it.
    """

    name: str

    @property
    @abstractmethod
    def path(self) -> Path:
        """Its file, for messages."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, of a quantized one those of the matrix and not of its codes."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The type of its floats by safetensors' name, of a quantized one the type before."""

    @property
    @abstractmethod
    def stored_dtype(self) -> str:
        """The type that the file has, such as "U8", or by llama.cpp's name "Q4_K"."""

    @property
    def is_quantized(self) -> bool:
        """Whether its files hold codes."""
        return False

    @property
    def is_mapped(self) -> bool:
        """Whether ``quantized`` leaves nearly all of it in its file."""
        return False

    @property
    def is_bfloat16(self) -> bool:
        """Whether its file holds it in bfloat16 as it is, so that ``bfloat16`` gives the bits."""
        return False

    @property
    def format(self) -> WeightFormat | None:
        """What ``quantized`` is stored in; None of floats, and of forms that no kernel has."""
        return None

    @property
    def must_requantize(self) -> bool:
        """Whether it is quantized in a form that no kernel has; ``read`` gives it."""
        return self.is_quantized and self.format is None

    @abstractmethod
    def raw(self) -> npt.NDArray[Any]:
        """The elements as stored, a view of the file where it can be; bfloat16 as uint16."""

    @abstractmethod
    def read(self) -> FloatArray:
        """The weight as finite float32 numbers in an array of their own, dequantized if need be."""

    @abstractmethod
    def quantized(self) -> QuantizedWeight | None:
        """The codes and scales as ``format`` says, some of them views of the file."""

    def bfloat16(self) -> npt.NDArray[np.uint16]:
        """The finite bits of one that ``is_bfloat16``, a read-only view of its file."""
        bits: npt.NDArray[np.uint16] = self.raw()
        if any(map(has_nonfinite, pieces(bits, _PIECE))):
            raise self._damaged()
        return bits

    def _finite(self, array: FloatArray) -> FloatArray:
        # Both are NaN if any element is, and no temporary array is needed.
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise self._damaged()
        return array

    def _damaged(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor {self.name!r} holds NaN or infinity, so the model is damaged"
        )


# ---- of floats -----------------------------------------------------------------------------------

Part = tuple[int | slice, ...]
"""An expert, and rows of its own, or columns."""


class FloatWeight(StoredWeight):
    """A tensor of a safetensors file as it is, or a part of a stack of experts'."""

    def __init__(
        self, files: Files, name: str, tensor: str, part: Part = (), *, transposed: bool = False
    ) -> None:
        """Takes its tensor, and where in it the weight lies: all of it, or perhaps transposed."""
        self.name, self.tensor = name, tensor
        self._files, self._file = files, files[tensor]
        self._part, self._transposed = part, transposed

    @property
    def path(self) -> Path:
        """The tensor's file."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own."""
        shape = self._file.shape(self.tensor)
        if not self._part:
            return shape
        places = zip(self._part, shape, strict=False)
        cut = [len(range(*p.indices(size))) for p, size in places if isinstance(p, slice)]
        sizes = (*cut, *shape[len(self._part) :])
        return sizes[::-1] if self._transposed else sizes

    @property
    def dtype(self) -> str:
        """The tensor's."""
        return self._file.dtype(self.tensor)

    stored_dtype = dtype

    @property
    def is_bfloat16(self) -> bool:
        """Whether it is a whole tensor of that type."""
        return not self._part and self.dtype == "BF16"

    def raw(self) -> npt.NDArray[Any]:
        """The elements as stored."""
        array = self._file.raw(self.tensor)
        return self._oriented(array[self._part]) if self._part else array

    def read(self) -> FloatArray:
        """The numbers, if nothing says that they are codes."""
        self._refuse_codes()
        return self._finite(self._oriented(self._file.float32(self.tensor, self._part)))

    def quantized(self) -> None:
        """None, if nothing says that it is codes."""
        self._refuse_codes()

    def _oriented(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array.T) if self._transposed else array

    def _refuse_codes(self) -> None:
        """Refuses a tensor that is quantized in a way that nothing in its folder says."""
        where, dtype = f"{self.path}: {self.tensor!r}", self.dtype
        if dtype in _OTHER_QUANTIZATIONS:
            raise UnsupportedModelError(
                f"{where} is stored as {_OTHER_QUANTIZATIONS[dtype]}, but neither scales beside it "
                "nor quantization_config in config.json say what they stand for: take the "
                "unquantized model"
            )
        is_codes = dtype == "U8" and self.tensor.endswith(".weight")
        if f"{self.tensor}.absmax" in self._files or is_codes:
            raise CheckpointError(
                f"{where} is quantized, but {self.tensor}.quant_state.bitsandbytes__nf4 is "
                "missing: the file is incomplete, or was not written by bitsandbytes"
            )


_OTHER_QUANTIZATIONS = {
    "I8": "8-bit integers",
    "F8_E4M3": "8-bit floats (FP8)",
    "F8_E5M2": "8-bit floats (FP8)",
}
