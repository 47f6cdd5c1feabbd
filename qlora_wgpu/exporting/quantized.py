"""A model with its linear layers in 4 bits, as bitsandbytes writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.quantized.bitsandbytes import nf4_entries, nf4_parts, quantization_config
from qlora_wgpu.checkpoint.safetensors_file import TORCH_NAMES, Entry
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.exporting.folders import Tensors, write_folder
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.model.checkpoint_reader import stored_name
from qlora_wgpu.model.pretrained import check_stored_shapes
from qlora_wgpu.quant import quantize_nf4

_HEAD = "lm_head"  # named in any case: with a list of ours transformers adds none of its own


def skipped_modules(
    folder: ModelFolder, architecture: Architecture, quantized: Iterable[str]
) -> list[str]:
    """The largest parts of a model without a quantized weight that may hold linear layers.

    They are named as in the files, and as in a running model of transformers 5, which puts
    ``model.`` before parts such as ``vision_tower``.
    """
    inner = {prefix for name in quantized for prefix in _prefixes(_module(name))}
    kept = {
        next(prefix for prefix in _prefixes(_module(name)) if prefix not in inner)
        for name in folder.names()
        if len(folder[name].shape) == 2 and _module(name) not in inner
    }
    running = {_running(name, architecture) for name in kept}
    embedding = architecture.embed_name, stored_name(folder, architecture, architecture.embed_name)
    return sorted({_HEAD, *kept, *running} - {_module(name) for name in embedding})


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _prefixes(module: str) -> list[str]:
    """A module and all that hold it, the largest first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _running(name: str, architecture: Architecture) -> str:
    for own, other in architecture.stored_prefixes:
        if other and f"{name}.".startswith(other):
            return (own + f"{name}.".removeprefix(other)).removesuffix(".")
    return name if name == _HEAD or name.startswith("model.") else f"model.{name}"


_DTYPES = {name: TORCH_NAMES[name] for name in ("F32", "F16", "BF16")}  # what bitsandbytes knows


def quantize_folder(
    model: str | PathLike[str],
    out: str | PathLike[str],
    quant: QuantConfig | None = None,
    *,
    experts: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a 4-bit folder that bitsandbytes and this package read; one tensor in memory at once.

    Embeddings, ``lm_head``, norms, biases and routers stay as they are, and so does all that is no
    part of the text model. Experts do, too, since transformers 5 stacks them, and neither it nor
    bitsandbytes takes them in 4 bits.
    """
    settings = quant or QuantConfig()
    form = settings.blocksize, settings.double_quant
    folder = ModelFolder.open(model)
    if folder.config.get("quantization_config") or folder.is_quantized:
        raise UnsupportedModelError(f"{model} is quantized already: nothing to do")
    architecture = find_family(folder.config).read(folder.config)
    check_stored_shapes(folder, architecture)
    specs = architecture.every_linear if experts else architecture.linears
    linears = {stored_name(folder, architecture, f"{s.name}.weight") for s in specs}
    parts: dict[str, dict[str, npt.NDArray[Any]]] = {}

    def quantized(name: str) -> dict[str, npt.NDArray[Any]]:
        """All parts of one weight; the last one that was made is kept."""
        if name not in parts:
            parts.clear()
            weight = quantize_nf4(folder[name].read(), *form)
            parts[name] = nf4_parts(name, weight, _DTYPES[folder[name].dtype])
        return parts[name]

    def tensors_of(name: str) -> Tensors:
        stack, weight = folder.stack(name), folder[name]
        if experts and stack is not None:
            return {n: t for part in stack.parts for n, t in tensors_of(part).items()}
        if name not in linears:
            return {name: (Entry(weight.dtype, weight.shape), weight.raw)}
        if weight.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{model}: {name} is stored as {weight.dtype}, and only floats are quantized "
                "here: take the model in 16 bits"
            )
        return {
            part: (entry, lambda part=part: quantized(name)[part])  # type: ignore[misc]
            for part, entry in nf4_entries(name, weight.shape, *form).items()
        }

    config = {
        **folder.config,
        "quantization_config": quantization_config(
            settings.double_quant, skipped_modules(folder, architecture, linears)
        ),
    }
    write_folder(folder, Path(out), config, tensors_of, progress)
