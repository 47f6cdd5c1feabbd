"""The adapter with the lowest held-out loss, in memory and in ``best/``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qlora_wgpu.checkpoint import atomic_folder, read_manifest, write_manifest
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.loaded_model import FloatArray
from qlora_wgpu.model.qlora_model import QLoRAModel


@dataclass(frozen=True, eq=False)
class BestAdapter:
    """An adapter's parameters, the held-out loss with them, and the steps done."""

    step: int
    loss: float
    parameters: FloatArray


def save_best(folder: Path, model: QLoRAModel, step: int, loss: float) -> None:
    """Writes the adapter as it is now.

    Raises:
        CheckpointError: If it cannot be written.
    """
    with atomic_folder(folder) as unfinished:
        model.save_adapter(unfinished)
        write_manifest(unfinished, {"step": step, "eval_loss": loss})


def load_best(folder: Path, model: QLoRAModel) -> BestAdapter | None:
    """The adapter that a folder holds; None if it is not whole or is none of this model."""
    try:
        manifest = read_manifest(folder)
        parameters = model.adapter.join(load_adapter(folder)[0])
        return BestAdapter(int(manifest["step"]), float(manifest["eval_loss"]), parameters)
    except (CheckpointError, KeyError):
        return None
