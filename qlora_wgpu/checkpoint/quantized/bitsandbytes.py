"""bitsandbytes' weights: read in 4 bits and 8, and written in 4 bits.

A 4-bit weight ``X`` is U8 (or any other dtype with the same bytes) and comes with ``X.absmax``,
``X.quant_map`` and, with double quantization, ``X.nested_absmax`` and ``X.nested_quant_map``. Its
state, a JSON object as bytes, is ``X.quant_state.bitsandbytes__nf4``, or ``__fp4``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.coded_weight import STORED_AS, CodedWeight
from qlora_wgpu.checkpoint.safetensors_file import Entry
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import BLOCKSIZES, NESTED_BLOCKSIZE, QuantizedWeight, WeightFormat
from qlora_wgpu.quant.safetensors_formats import INT8, scaled_weight

# ---- 8 bits --------------------------------------------------------------------------------------

_SCALES, _ORDER = "SCB", "weight_format"


class Int8Weight(CodedWeight):
    """LLM.int8: an I8 tensor with a scale for each row."""

    codes_types = ("I8",)
    companions = (_SCALES, _ORDER)
    format = INT8

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored."""
        rows, columns = self.shape
        if self._has(_ORDER) and self._raw(_ORDER, ("U8",)) != 0:
            raise self._error(_ORDER, "is not row-major, which is not supported")
        codes = self._raw(self.codes_leaf, ("I8",), (rows, columns)).view(np.uint8)
        return scaled_weight(INT8, codes, self._floats(_SCALES, (rows,)), self.torch_dtype)


# ---- 4 bits --------------------------------------------------------------------------------------

STATE = ".quant_state.bitsandbytes__"
NF4_STATE = f"{STATE}nf4"

ABSMAX = "absmax"
QUANT_MAP = "quant_map"
NESTED_ABSMAX = "nested_absmax"
NESTED_QUANT_MAP = "nested_quant_map"

QUANT_MAP_SIZE = 16
NESTED_QUANT_MAP_SIZE = 256

_DTYPES = ("float32", "float16", "bfloat16")


class FourBitWeight(CodedWeight):
    """A weight in NF4 or FP4; its arrays are views of the file."""

    is_mapped = True  # codes are stored as the device reads them
    codes_leaf = ""

    @property
    def exists(self) -> bool:
        """Whether the files have its state."""
        return self._has(self._state_leaf)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in its state."""
        shape = self._state.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(size) is int and 0 < size < 2**31 for size in shape)
        ):
            raise self._state_error(f"has shape {shape!r}, which is not that of a matrix")
        return shape[0], shape[1]

    @property
    def dtype(self) -> str:
        """The dtype in its state."""
        return STORED_AS[self._dtype_before]

    @cached_property
    def format(self) -> WeightFormat:
        """NF4 or FP4, with the file's quant_map."""
        return WeightFormat(
            self._type.upper(),
            self._numbers(QUANT_MAP, QUANT_MAP_SIZE),
            self._blocksize,
            self._integer("nested_blocksize") if self._is_nested else None,
            has_offset=self._is_nested,
        )

    def quantized(self) -> QuantizedWeight:
        """Codes and scales as stored."""
        shape, dtype = self.shape, self._dtype_before
        codes = self._bytes("", self.format.code_bytes(*shape))
        scales = self._scales(self.format.block_count(*shape))
        return QuantizedWeight(shape, self.format, codes, dtype=dtype, **scales)

    def owns(self, tensor: str) -> bool:
        """Whether a tensor is a companion of the weight."""
        return tensor.startswith(f"{self.name}.")

    def _leaf(self, leaf: str) -> str:
        return f"{self.name}.{leaf}" if leaf else self.name

    @property
    def _type(self) -> str:
        return "nf4" if f"{self.name}{NF4_STATE}" in self._files else "fp4"

    @property
    def _state_leaf(self) -> str:
        return f"{STATE[1:]}{self._type}"

    @cached_property
    def _state(self) -> dict[str, Any]:
        tensor = self._leaf(self._state_leaf)
        try:
            state = json.loads(self._files[tensor].raw(tensor).tobytes().decode("utf-8"))
        except (RecursionError, ValueError) as err:
            raise self._state_error("is not valid JSON") from err
        if not isinstance(state, dict):
            raise self._state_error("is not a JSON object")
        if state.get("quant_type") != self._type:
            raise self._state_error(
                f"must have quant_type {self._type!r}, got {state.get('quant_type')!r}"
            )
        return state

    @property
    def _dtype_before(self) -> str:
        dtype = self._state.get("dtype")
        if dtype not in _DTYPES:
            raise self._state_error(f"must have a dtype of {', '.join(_DTYPES)}, got {dtype!r}")
        return str(dtype)

    @property
    def _blocksize(self) -> int:
        blocksize = self._integer("blocksize")
        if blocksize not in BLOCKSIZES:
            raise self._state_error(
                f"has blocksize {blocksize}, which bitsandbytes does not support"
            )
        return blocksize

    @property
    def _is_nested(self) -> bool:
        return "nested_offset" in self._state or self._has(NESTED_ABSMAX)

    def _scales(self, blocks: int) -> dict[str, Any]:
        if not self._is_nested:
            return {ABSMAX: self._numbers(ABSMAX, blocks)}
        nested_blocksize = self._integer("nested_blocksize")
        if self._state.get("nested_dtype", "float32") != "float32":
            raise self._state_error(
                f"must have nested_dtype 'float32', got {self._state['nested_dtype']!r}"
            )
        offset: Any = self._state.get("nested_offset")
        if type(offset) not in (int, float) or not abs(offset) <= float(np.finfo(np.float32).max):
            raise self._state_error(f"must have a float32 nested_offset, got {offset!r}")
        return {
            "absmax": self._bytes(ABSMAX, blocks),
            "nested_absmax": self._numbers(NESTED_ABSMAX, -(-blocks // nested_blocksize)),
            "nested_quant_map": self._numbers(NESTED_QUANT_MAP, NESTED_QUANT_MAP_SIZE),
            "nested_offset": float(np.float32(offset)),
        }

    def _integer(self, key: str) -> int:
        value = self._state.get(key)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._state_error(f"must have a positive integer as {key}, got {value!r}")
        return value

    def _bytes(self, leaf: str, count: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, stored as any dtype (``bnb_4bit_quant_storage``)."""
        tensor = self._found(leaf)
        file = self._files[tensor]
        if leaf and file.dtype(tensor) != "U8":
            raise self._error(
                leaf, f"must have dtype U8 with double quantization, got {file.dtype(tensor)}"
            )
        stored = np.ascontiguousarray(file.raw(tensor)).reshape(-1).view(np.uint8)
        self._check_count(leaf, stored.size, count, "bytes")
        return stored

    def _numbers(self, leaf: str, count: int) -> npt.NDArray[np.float32]:
        tensor = self._found(leaf)
        file = self._files[tensor]
        as_stored = file.dtype(tensor) == "F32"
        numbers = (file.raw(tensor) if as_stored else file.float32(tensor)).reshape(-1)
        self._check_count(leaf, numbers.size, count, "numbers")
        if not np.isfinite(numbers).all():
            raise self._error(leaf, "contains NaN or infinity")
        return numbers

    def _check_count(self, leaf: str, count: int, expected: int, what: str) -> None:
        if count != expected:
            raise self._error(
                leaf,
                f"has {count} {what}, but its quant_state (shape {self._state['shape']}, blocksize "
                f"{self._state['blocksize']}) requires {expected}",
            )

    def _state_error(self, what: str) -> CheckpointError:
        return self._error(self._state_leaf, what)


# ---- writing -------------------------------------------------------------------------------------

_STATE_BYTES = 256  # padded with spaces, so that sizes do not depend on the weights


def nf4_entries(
    name: str, shape: tuple[int, ...], blocksize: int, double_quant: bool
) -> dict[str, Entry]:
    """Dtypes and shapes of ``nf4_parts``, known before the weight is quantized."""
    count = int(np.prod(shape))
    blocks = -(-count // blocksize)
    entries = {
        name: Entry("U8", (-(-count // 2), 1)),
        f"{name}.{ABSMAX}": Entry("U8" if double_quant else "F32", (blocks,)),
    }
    if double_quant:
        entries[f"{name}.{NESTED_ABSMAX}"] = Entry("F32", (-(-blocks // NESTED_BLOCKSIZE),))
        entries[f"{name}.{NESTED_QUANT_MAP}"] = Entry("F32", (NESTED_QUANT_MAP_SIZE,))
    entries[f"{name}.{QUANT_MAP}"] = Entry("F32", (QUANT_MAP_SIZE,))
    entries[name + NF4_STATE] = Entry("U8", (_STATE_BYTES,))
    return entries


def nf4_parts(name: str, weight: QuantizedWeight, dtype: str) -> dict[str, npt.NDArray[Any]]:
    """A quantized weight and its companions; ``dtype`` is PyTorch's dtype before quantization."""
    parts = {name: weight.codes.reshape(-1, 1), f"{name}.{ABSMAX}": weight.absmax}
    if weight.nested_absmax is not None and weight.nested_quant_map is not None:
        parts[f"{name}.{NESTED_ABSMAX}"] = weight.nested_absmax
        parts[f"{name}.{NESTED_QUANT_MAP}"] = weight.nested_quant_map
    parts[f"{name}.{QUANT_MAP}"] = weight.format.quant_map
    text = json.dumps(_state(weight, dtype)).encode().ljust(_STATE_BYTES)
    parts[name + NF4_STATE] = np.frombuffer(text, np.uint8)
    return parts


def quantization_config(double_quant: bool, skipped: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder with 4-bit weights."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": list(skipped),
    }


def _state(weight: QuantizedWeight, dtype: str) -> dict[str, Any]:
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": weight.format.blocksize,
        "dtype": dtype,
        "shape": list(weight.shape),
    }
    if weight.nested_absmax is not None:
        state |= {
            "nested_blocksize": weight.format.nested_blocksize,
            "nested_dtype": "float32",
            "nested_offset": float(weight.nested_offset or 0.0),
        }
    return state
