"""4-bit weights as bitsandbytes writes them; ``bitsandbytes.py`` reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.bitsandbytes_format import (
    ABSMAX,
    NESTED_ABSMAX,
    NESTED_QUANT_MAP,
    NESTED_QUANT_MAP_SIZE,
    NF4_STATE,
    QUANT_MAP,
    QUANT_MAP_SIZE,
)
from qlora_wgpu.checkpoint.stream import Entry
from qlora_wgpu.quant import NESTED_BLOCKSIZE, QuantizedWeight

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
    """The ``quantization_config`` of config.json for a folder with weights in 4 bits.

    Args:
        double_quant: Whether their scales are in 8 bits.
        skipped: The modules that are kept as they were, by transformers' names.
    """
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
