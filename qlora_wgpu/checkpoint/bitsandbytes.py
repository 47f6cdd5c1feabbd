"""Weights as bitsandbytes stores them in 4 bits, read and written with all their companions.

A weight ``X`` is U8 (or any other type of the same bytes) and comes with ``X.absmax``,
``X.quant_map`` and, if doubly quantized, ``X.nested_absmax`` and ``X.nested_quant_map``. Its state,
a JSON object as bytes, is ``X.quant_state.bitsandbytes__nf4``, or ``__fp4``.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.checkpoint.safetensors_writer import Entry
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.quant import BLOCKSIZES, NESTED_BLOCKSIZE, QuantizedWeight, WeightFormat

STATE = ".quant_state.bitsandbytes__"
NF4_STATE = f"{STATE}nf4"
STATES = (NF4_STATE, f"{STATE}fp4")

ABSMAX = "absmax"
QUANT_MAP = "quant_map"
NESTED_ABSMAX = "nested_absmax"
NESTED_QUANT_MAP = "nested_quant_map"

QUANT_MAP_SIZE = 16
NESTED_QUANT_MAP_SIZE = 256


# ---- reading -------------------------------------------------------------------------------------

_DTYPES = ("float32", "float16", "bfloat16")
_OTHER_QUANTIZATIONS = {
    "I8": "8-bit integers",
    "F8_E4M3": "8-bit floats (FP8)",
    "F8_E5M2": "8-bit floats (FP8)",
}


def read_4bit(
    files: Mapping[str, SafetensorsFile], name: str, *, mapped: bool = False
) -> QuantizedWeight:
    """Reads a weight that has a state of 4 bits."""
    return _Reader(files, name, mapped=mapped).read()


def read_4bit_format(files: Mapping[str, SafetensorsFile], name: str) -> WeightFormat:
    """The format of a weight that has a state of 4 bits; errors as for ``read_4bit``."""
    return _Reader(files, name).format()


def read_4bit_shape(files: Mapping[str, SafetensorsFile], name: str) -> tuple[int, int]:
    """The shape of a weight that has a state of 4 bits; errors as for ``read_4bit``."""
    return _Reader(files, name).shape()


def read_4bit_dtype(files: Mapping[str, SafetensorsFile], name: str) -> str:
    """PyTorch's name of the type of such a weight before; errors as for ``read_4bit``."""
    return _Reader(files, name).dtype()


def has_4bit_state(names: Container[str], name: str) -> bool:
    """Whether a weight has the state that says how it is stored in 4 bits."""
    return any(f"{name}{state}" in names for state in STATES)


def refuse_unknown(files: Mapping[str, SafetensorsFile], name: str) -> None:
    """Refuses a tensor that is quantized in a way that nothing in its folder says."""
    where = f"{files[name].path}: {name!r}"
    dtype = files[name].dtype(name)
    if dtype in _OTHER_QUANTIZATIONS:
        raise UnsupportedModelError(
            f"{where} is stored as {_OTHER_QUANTIZATIONS[dtype]}, but neither scales beside it nor "
            "quantization_config in config.json say what they stand for: take the unquantized model"
        )
    if f"{name}.{ABSMAX}" in files or (dtype == "U8" and name.endswith(".weight")):
        raise CheckpointError(
            f"{where} is quantized, but {name}{STATE}nf4 is missing: the file is incomplete, or "
            "was not written by bitsandbytes"
        )


class _Reader:
    def __init__(
        self, files: Mapping[str, SafetensorsFile], name: str, *, mapped: bool = False
    ) -> None:
        self._mapped = mapped
        self._files = files
        self._name = name
        self._type = next(t for t in ("nf4", "fp4") if f"{name}{STATE}{t}" in files)
        self._state_name = f"{name}{STATE}{self._type}"
        self._state = self._read_state()

    def format(self) -> WeightFormat:
        return WeightFormat(
            self._type.upper(),
            self._floats(QUANT_MAP, QUANT_MAP_SIZE),
            self._blocksize(),
            self._integer("nested_blocksize") if self._is_nested else None,
            has_offset=self._is_nested,
        )

    def read(self) -> QuantizedWeight:
        shape = self.shape()
        blocksize = self._blocksize()
        dtype = self.dtype()
        n = shape[0] * shape[1]
        return QuantizedWeight(
            shape=shape,
            codes=self._bytes("", -(-n // 2)),
            quant_map=self._floats(QUANT_MAP, QUANT_MAP_SIZE),
            blocksize=blocksize,
            dtype=dtype,
            name=self._type.upper(),
            **self._scales(-(-n // blocksize)),
        )

    def dtype(self) -> str:
        dtype = self._state.get("dtype")
        if dtype not in _DTYPES:
            raise self._wrong(f"says dtype {dtype!r}, not one of {_DTYPES}")
        return str(dtype)

    def _blocksize(self) -> int:
        blocksize = self._integer("blocksize")
        if blocksize not in BLOCKSIZES:
            raise self._wrong(f"says blocksize {blocksize}, but bitsandbytes has no such blocks")
        return blocksize

    @property
    def _is_nested(self) -> bool:
        return "nested_offset" in self._state or f"{self._name}.{NESTED_ABSMAX}" in self._files

    def _scales(self, blocks: int) -> dict[str, Any]:
        if not self._is_nested:
            return {ABSMAX: self._floats(ABSMAX, blocks)}
        nested_blocksize = self._integer("nested_blocksize")
        if self._state.get("nested_dtype", "float32") != "float32":
            raise self._wrong(f"says nested_dtype {self._state['nested_dtype']!r}, not 'float32'")
        offset: Any = self._state.get("nested_offset")
        if type(offset) not in (int, float) or not abs(offset) <= float(np.finfo(np.float32).max):
            raise self._wrong(f"says nested_offset {offset!r}, which is no float32 number")
        return {
            "absmax": self._bytes(ABSMAX, blocks),
            "nested_absmax": self._floats(NESTED_ABSMAX, -(-blocks // nested_blocksize)),
            "nested_quant_map": self._floats(NESTED_QUANT_MAP, NESTED_QUANT_MAP_SIZE),
            "nested_offset": float(np.float32(offset)),
            "nested_blocksize": nested_blocksize,
        }

    def _read_state(self) -> dict[str, Any]:
        raw = self._files[self._state_name].raw(self._state_name)
        try:
            state = json.loads(raw.tobytes().decode("utf-8"))
        except (RecursionError, ValueError) as err:
            raise self._wrong("is not valid JSON") from err
        if not isinstance(state, dict):
            raise self._wrong("holds no JSON object")
        if state.get("quant_type") != self._type:
            raise self._wrong(f"says quant_type {state.get('quant_type')!r}, not {self._type!r}")
        return state

    def shape(self) -> tuple[int, int]:
        shape = self._state.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(size) is int and 0 < size < 2**31 for size in shape)
        ):
            raise self._wrong(f"says shape {shape!r}, which is no matrix's")
        return shape[0], shape[1]

    def _integer(self, key: str) -> int:
        value = self._state.get(key)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(f"says {key} {value!r}, which is no size")
        return value

    def _bytes(self, leaf: str, count: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, whatever type they are stored as (``bnb_4bit_quant_storage``)."""
        name, file = self._locate(leaf)
        if leaf and file.dtype(name) != "U8":
            raise CheckpointError(
                f"{file.path}: {name!r} has dtype {file.dtype(name)}, but doubly quantized scales "
                "are U8"
            )
        stored = np.ascontiguousarray(file.raw(name)).reshape(-1).view(np.uint8)
        self._check_count(name, stored.size, count, "bytes")
        return stored if self._mapped else stored.copy()

    def _floats(self, leaf: str, count: int) -> npt.NDArray[np.float32]:
        name, file = self._locate(leaf)
        as_stored = self._mapped and file.dtype(name) == "F32"
        numbers = (file.raw(name) if as_stored else file.float32(name)).reshape(-1)
        self._check_count(name, numbers.size, count, "numbers")
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{file.path}: {name!r} holds NaN or infinity")
        return numbers

    def _locate(self, leaf: str) -> tuple[str, SafetensorsFile]:
        name = f"{self._name}.{leaf}" if leaf else self._name
        if name not in self._files:
            raise CheckpointError(
                f"{self._files[self._name].path}: {self._name!r} is quantized, but {name!r} is "
                "missing"
            )
        return name, self._files[name]

    def _check_count(self, name: str, count: int, expected: int, what: str) -> None:
        if count != expected:
            raise CheckpointError(
                f"{self._files[name].path}: {name!r} has {count} {what}, but {expected} follow "
                f"from its quant_state (shape {self._state['shape']}, blocksize "
                f"{self._state['blocksize']})"
            )

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._files[self._state_name].path}: {self._state_name!r} {what}")


# ---- writing -------------------------------------------------------------------------------------

_STATE_BYTES = 256  # filled up with spaces, so that its size does not depend on the weights


def nf4_entries(
    name: str, shape: tuple[int, ...], blocksize: int, double_quant: bool
) -> dict[str, Entry]:
    """Types and shapes of ``nf4_parts``, known before the weight is quantized."""
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
    """A quantized weight and its companions.

    Args:
        name: The weight's name.
        weight: The weight.
        dtype: The weight's type before, as PyTorch calls it, for example "bfloat16".
    """
    parts = {name: weight.codes.reshape(-1, 1), f"{name}.{ABSMAX}": weight.absmax}
    if weight.nested_absmax is not None and weight.nested_quant_map is not None:
        parts[f"{name}.{NESTED_ABSMAX}"] = weight.nested_absmax
        parts[f"{name}.{NESTED_QUANT_MAP}"] = weight.nested_quant_map
    parts[f"{name}.{QUANT_MAP}"] = weight.quant_map
    text = json.dumps(_state(weight, dtype)).encode().ljust(_STATE_BYTES)
    parts[name + NF4_STATE] = np.frombuffer(text, np.uint8)
    return parts


def quantization_config(double_quant: bool, skipped: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json for a folder with weights in 4 bits."""
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
        "blocksize": weight.blocksize,
        "dtype": dtype,
        "shape": list(weight.shape),
    }
    if weight.nested_absmax is not None:
        state |= {
            "nested_blocksize": weight.nested_blocksize,
            "nested_dtype": "float32",
            "nested_offset": float(weight.nested_offset or 0.0),
        }
    return state
