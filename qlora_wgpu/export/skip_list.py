"""``llm_int8_skip_modules``: the modules that a 4-bit folder keeps, as transformers finds them."""

from __future__ import annotations

from collections.abc import Iterable

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.model.checkpoint_reader import stored_name

_HEAD = "lm_head"  # named in any case: with a list of ours transformers adds none of its own


def skipped_modules(
    folder: ModelFolder, architecture: Architecture, quantized: Iterable[str]
) -> list[str]:
    """The largest parts of a model without a quantized weight that may hold linear layers.

    They are named as in the files, and as in a running model of transformers 5, which puts
    ``model.`` before parts such as ``vision_tower``.

    Args:
        folder: The model.
        architecture: Its text part, which tells how modules are called while it runs.
        quantized: The names of the weights in 4 bits, as stored.
    """
    inner = {prefix for name in quantized for prefix in _prefixes(_module(name))}
    kept = {
        next(prefix for prefix in _prefixes(_module(name)) if prefix not in inner)
        for name in folder.names()
        if len(folder.shape(name)) == 2 and _module(name) not in inner
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
