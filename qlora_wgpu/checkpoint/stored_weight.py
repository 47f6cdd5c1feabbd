"""Handles of a model's stored weights, including parts of stacks of experts.

``P.experts.gate_up_proj`` is (experts, 2 · rows, columns), gate above up, and
``P.experts.down_proj`` (experts, rows, columns), both unquantized. Each expert's matrices are
separate weights here: ``P.experts.3.gate_proj.weight``.

Granite calls the stacks ``P.input_linear.weight`` and ``P.output_linear.weight``. gpt-oss's stacks
are transposed, with alternating columns of gate and up: (experts, columns, 2 · rows), and
``…_bias`` (experts, 2 · rows). Its published files have MXFP4 codes instead, ``…_blocks``, which
``Mxfp4ExpertWeight`` reads (``quantized/float_weights.py``).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import has_nonfinite
from qlora_wgpu.checkpoint.safetensors_file import FLOATS, SafetensorsFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.mapped_files import pieces
from qlora_wgpu.quant import QuantizedWeight, WeightFormat

Files = Mapping[str, SafetensorsFile]
"""The open file of each tensor."""
FloatArray = npt.NDArray[np.float32]

_PIECE = 1 << 22  # numbers that are checked at a time


class StoredWeight(ABC):
    """A weight in a model's files, which is read on demand.

    Attributes:
        name: Hugging Face's name.
    """

    name: str

    @property
    @abstractmethod
    def path(self) -> Path:
        """Its file, for messages."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, also if it is quantized."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of its floats by safetensors' name; before quantization, if quantized."""

    @property
    @abstractmethod
    def stored_dtype(self) -> str:
        """The dtype in the file, such as "U8", or llama.cpp's "Q4_K"."""

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored quantized."""
        return False

    @property
    def is_mapped(self) -> bool:
        """Whether most of ``quantized`` is a view of the file."""
        return False

    @property
    def is_bfloat16(self) -> bool:
        """Whether ``bfloat16`` may be called: it is stored in bfloat16, as a whole tensor."""
        return False

    @property
    def format(self) -> WeightFormat | None:
        """The format of ``quantized``; None if it is not quantized, or no kernel reads it."""
        return None

    @property
    def must_requantize(self) -> bool:
        """Whether it is quantized in a format that no kernel reads."""
        return self.is_quantized and self.format is None

    @abstractmethod
    def raw(self) -> npt.NDArray[Any]:
        """The elements as stored, a view of the file if possible; bfloat16 as uint16."""

    @abstractmethod
    def read(self) -> FloatArray:
        """A copy of the weight as float32, dequantized if needed; all values are finite."""

    @abstractmethod
    def quantized(self) -> QuantizedWeight | None:
        """Codes and scales in ``format``, some of them views of the file."""

    def bfloat16(self) -> npt.NDArray[np.uint16]:
        """The bits of a weight that ``is_bfloat16``, all finite: a read-only view of its file."""
        bits: npt.NDArray[np.uint16] = self.raw()
        if any(map(has_nonfinite, pieces(bits, _PIECE))):
            raise self._damaged()
        return bits

    def _finite(self, array: FloatArray) -> FloatArray:
        # Minimum and maximum are NaN if any element is, and need no temporary array.
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise self._damaged()
        return array

    def _damaged(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor {self.name!r} contains NaN or infinity: the model is damaged"
        )


# ---- floats --------------------------------------------------------------------------------------

Part = tuple[int | slice, ...]
"""The index of an expert, and of its rows or columns."""


class FloatWeight(StoredWeight):
    """An unquantized tensor of a safetensors file, or a part of a stack of experts."""

    def __init__(
        self, files: Files, name: str, tensor: str, part: Part = (), *, transposed: bool = False
    ) -> None:
        self.name, self.tensor = name, tensor
        self._files, self._file = files, files[tensor]
        self._part, self._transposed = part, transposed

    @property
    def path(self) -> Path:
        """As in ``StoredWeight``."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, ...]:
        """As in ``StoredWeight``."""
        shape = self._file.shape(self.tensor)
        if not self._part:
            return shape
        slices = zip(self._part, shape, strict=False)
        lengths = [len(range(*p.indices(size))) for p, size in slices if isinstance(p, slice)]
        sizes = (*lengths, *shape[len(self._part) :])
        return sizes[::-1] if self._transposed else sizes

    @property
    def dtype(self) -> str:
        """As in ``StoredWeight``."""
        return self._file.dtype(self.tensor)

    stored_dtype = dtype

    @property
    def is_bfloat16(self) -> bool:
        """As in ``StoredWeight``."""
        return not self._part and self.dtype == "BF16"

    def raw(self) -> npt.NDArray[Any]:
        """As in ``StoredWeight``."""
        array = self._file.raw(self.tensor)
        return self._oriented(array[self._part]) if self._part else array

    def read(self) -> FloatArray:
        """As in ``StoredWeight``; refuses tensors that seem to be quantized."""
        self._refuse_codes()
        return self._finite(self._oriented(self._file.float32(self.tensor, self._part)))

    def quantized(self) -> None:
        """None; refuses tensors that seem to be quantized."""
        self._refuse_codes()

    def _oriented(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array.T) if self._transposed else array

    def _refuse_codes(self) -> None:
        where, dtype = f"{self.path}: {self.tensor!r}", self.dtype
        if dtype in _OTHER_QUANTIZATIONS:
            raise UnsupportedModelError(
                f"{where} is stored as {_OTHER_QUANTIZATIONS[dtype]}, but neither scales nor "
                "quantization_config in config.json describe them: use the unquantized model"
            )
        is_codes = dtype == "U8" and self.tensor.endswith(".weight")
        if f"{self.tensor}.absmax" in self._files or is_codes:
            raise CheckpointError(
                f"{where} is quantized, but {self.tensor}.quant_state.bitsandbytes__nf4 is "
                "missing: the file is incomplete or was not written by bitsandbytes"
            )


_OTHER_QUANTIZATIONS = {
    "I8": "8-bit integers",
    "F8_E4M3": "8-bit floats (FP8)",
    "F8_E5M2": "8-bit floats (FP8)",
}


# ---- stacks of experts ---------------------------------------------------------------------------

IN_TURNS = ("gpt_oss",)
"""Model types with transposed stacks in which gate and up alternate."""
_EITHER_WAY = ("qwen3_vl_moe",)
"""Model types whose published stacks are transposed, and those that transformers 5 saves not."""

_WEIGHT = re.compile(r"(.*\.experts)\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.(weight|bias)")
_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj|(.*)\.(in|out)put_linear\.weight")
_GRANITE = {"gate_up": "input_linear.weight", "down": "output_linear.weight"}
_LEAVES = {"gate_up": ("gate", "up"), "down": ("down",)}
_BLOCKS = "_blocks"
_DIMENSIONS = {"weight": 3, "bias": 2}


@dataclass(frozen=True)
class ExpertStack:
    """A tensor with a matrix of all experts, perhaps as codes."""

    name: str  # the unquantized tensor's name
    parts: list[str]  # the names of its weights, in order
    experts: int
    in_turns: bool  # whether it is stored like gpt-oss's
    transposed: bool = False  # whether it is (experts, in_features, out_features)

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The unquantized tensor's shape, for parts of this shape."""
        together = rows * len(self.parts) // self.experts
        own = (columns, together) if self.transposed else (together, columns)
        return self.experts, *own

    def joined(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The unquantized tensor of all its parts."""
        rows, columns = parts[0].shape
        shape = self.shape(rows, columns)
        if not self.transposed:
            return np.concatenate(parts).reshape(shape)
        separate = np.stack(parts).reshape(self.experts, -1, rows, columns)  # experts, kinds, …
        order = (0, 3, 2, 1) if self.in_turns else (0, 3, 1, 2)
        return np.ascontiguousarray(separate.transpose(order)).reshape(shape)


class ExpertStacks:
    """The stacks of experts in a folder's files."""

    def __init__(self, files: Files, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._files = files
        text = config.get("text_config")
        self._hidden_size = (text if isinstance(text, Mapping) else config).get("hidden_size")
        self._in_turns = config.get("model_type") in IN_TURNS
        self._either_way = config.get("model_type") in _EITHER_WAY

    def find(self, name: str) -> FloatWeight | None:
        """A weight in an unquantized stack."""
        match = _WEIGHT.fullmatch(name)
        if match is None or (match[4] == "bias" and not self._in_turns):
            return None
        at, expert, leaf = match[1], int(match[2]), match[3]
        kind = "down" if leaf == "down" else "gate_up"
        stack = f"{at}.{kind}_proj" + ("_bias" if match[4] == "bias" else "")
        if stack not in self._files:
            stack = f"{at.removesuffix('experts')}{_GRANITE[kind]}"
        count, place = len(_LEAVES[kind]), _LEAVES[kind].index(leaf)
        shape = self._shape(stack, _DIMENSIONS[match[4]], count)
        if shape is None or expert >= shape[0]:
            return None
        transposed = self._is_transposed(kind, shape)
        rows = shape[-1 if transposed else 1] // count
        own = slice(rows * place, rows * (place + 1))
        if self._in_turns:
            own = slice(place, None, count)
        if transposed:
            columns = *[slice(None)] * (len(shape) - 2), own
            return FloatWeight(self._files, name, stack, (expert, *columns), transposed=True)
        return FloatWeight(self._files, name, stack, (expert, own))

    def stack(self, tensor: str) -> ExpertStack | None:
        """The stack in a stored tensor; None if it is not one."""
        is_packed = self._in_turns and tensor.endswith(_BLOCKS)
        name = tensor.removesuffix(_BLOCKS) if is_packed else tensor
        match = _STACK.fullmatch(name)
        if match is None or tensor not in self._files:
            return None
        at, kind = match[1], match[2]
        if at is None:
            at, kind = f"{match[3]}.experts", "gate_up" if match[4] == "in" else "down"
        leaves = _LEAVES[kind]
        shape = self._files[tensor].shape(tensor)
        if not (is_packed and shape) and self._shape(tensor, 3, len(leaves)) is None:
            return None
        parts = [f"{at}.{i}.{leaf}_proj.weight" for i in range(shape[0]) for leaf in leaves]
        transposed = self._is_transposed(kind, shape)
        return ExpertStack(name, parts, shape[0], self._in_turns, transposed)

    def _shape(self, stack: str, dimensions: int, halves: int) -> tuple[int, ...] | None:
        """An unquantized stack's shape; None if there is no such stack."""
        file = self._files.get(stack)
        if file is None or file.dtype(stack) not in FLOATS:
            return None
        shape = file.shape(stack)
        kind = "gate_up" if halves == 2 else "down"
        if len(shape) != dimensions:
            return None
        return None if shape[-1 if self._is_transposed(kind, shape) else 1] % halves else shape

    def _is_transposed(self, kind: str, shape: tuple[int, ...]) -> bool:
        """Whether a stack's rows are its last dimension, as transformers tells from its shape."""
        plain = shape[-1 if kind == "gate_up" else 1] == self._hidden_size
        return self._in_turns or (self._either_way and not plain)
