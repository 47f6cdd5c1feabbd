"""A model with its linear layers in 4 bits, as bitsandbytes writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.stream import Entry
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.export.folders import Tensors, write_folder
from qlora_wgpu.families.family import find_family
from qlora_wgpu.model.weights import stored_name
from qlora_wgpu.quant import NF4Tensor, quantize_nf4
from qlora_wgpu.quant.double_quant import NESTED_BLOCKSIZE

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STATE = ".quant_state.bitsandbytes__nf4"
_STATE_BYTES = 256  # filled up with spaces, so that its size does not depend on the weights


def quantize_folder(
    model: str | PathLike[str],
    out: str | PathLike[str],
    quant: QuantConfig | None = None,
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a 4-bit folder that bitsandbytes and this package read; one tensor in memory at once.

    Embeddings, ``lm_head``, norms, biases and routers stay as they are.

    Args:
        model: Folder or hub name of the model.
        out: The new folder.
        quant: Block size and double quantization.
        progress: Called with each tensor's name before it is written.

    Raises:
        CheckpointError: If a file is missing or damaged.
        UnsupportedModelError: If the model is quantized already.
        ConfigError: If ``out`` is there already.
    """
    settings = quant or QuantConfig()
    folder = ModelFolder.open(model)
    if folder.config.get("quantization_config"):
        raise UnsupportedModelError(f"{model} is quantized already: nothing to do")
    architecture = find_family(folder.config).read(folder.config)
    linears = {
        stored_name(folder, architecture, f"{s.name}.weight") for s in architecture.every_linear
    }
    made: dict[str, dict[str, npt.NDArray[Any]]] = {}

    def quantized(name: str) -> dict[str, npt.NDArray[Any]]:
        """All parts of one weight; the last one that was made is kept."""
        if name not in made:
            made.clear()
            found = quantize_nf4(folder.float32(name), settings.blocksize, settings.double_quant)
            made[name] = _parts(name, found, _DTYPES[folder.dtype(name)])
        return made[name]

    def tensors_of(name: str) -> Tensors:
        if name not in linears:
            return {name: (Entry(folder.dtype(name), folder.shape(name)), lambda: folder.raw(name))}
        if folder.dtype(name) not in _DTYPES:
            raise UnsupportedModelError(f"{model}: {name} is stored as {folder.dtype(name)}")
        return {
            part: (entry, lambda part=part: quantized(name)[part])  # type: ignore[misc]
            for part, entry in _entries(name, folder.shape(name), settings).items()
        }

    config = {
        **folder.config,
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": settings.double_quant,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
        },
    }
    write_folder(folder, Path(out), config, tensors_of, progress)


def _entries(name: str, shape: tuple[int, ...], settings: QuantConfig) -> dict[str, Entry]:
    """The parts of a quantized weight, before it is quantized."""
    count = int(np.prod(shape))
    blocks = -(-count // settings.blocksize)
    double = settings.double_quant
    found = {
        name: Entry("U8", (-(-count // 2), 1)),
        f"{name}.absmax": Entry("U8" if double else "F32", (blocks,)),
    }
    if double:
        found[f"{name}.nested_absmax"] = Entry("F32", (-(-blocks // NESTED_BLOCKSIZE),))
        found[f"{name}.nested_quant_map"] = Entry("F32", (256,))
    found[f"{name}.quant_map"] = Entry("F32", (16,))
    found[name + _STATE] = Entry("U8", (_STATE_BYTES,))
    return found


def _parts(name: str, found: NF4Tensor, dtype: str) -> dict[str, npt.NDArray[Any]]:
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": found.blocksize,
        "dtype": dtype,
        "shape": list(found.shape),
    }
    parts = {name: found.codes.reshape(-1, 1), f"{name}.absmax": found.absmax}
    if found.nested_absmax is not None and found.nested_quant_map is not None:
        parts[f"{name}.nested_absmax"] = found.nested_absmax
        parts[f"{name}.nested_quant_map"] = found.nested_quant_map
        state |= {
            "nested_blocksize": found.nested_blocksize,
            "nested_dtype": "float32",
            "nested_offset": float(found.nested_offset),
        }
    parts[f"{name}.quant_map"] = found.quant_map
    text = json.dumps(state).encode().ljust(_STATE_BYTES)
    parts[name + _STATE] = np.frombuffer(text, np.uint8)
    return parts
