"""The adapter with the best held-out figure, in memory and in ``best/``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qlora_wgpu.checkpoint import atomic_folder, read_manifest, write_manifest
from qlora_wgpu.checkpoint.manifest import MANIFEST
from qlora_wgpu.config import EvalConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.adapter_model import AdapterModel, FloatArray
from qlora_wgpu.model.adapter_state import read_started
from qlora_wgpu.presence import exists


@dataclass(frozen=True, eq=False)
class BestAdapter:
    """An adapter's parameters, the held-out figures with them, and the steps done.

    Attributes:
        step: The steps done.
        loss: The held-out loss.
        figure: What it is the best by.
        aim: What is best: ``EvalConfig.aim``.
        parameters: In their order on the device.
        is_saved: Whether it is on the disk.
    """

    step: int
    loss: float
    figure: float
    aim: str
    parameters: FloatArray
    is_saved: bool = False


def save_best(folder: Path, model: AdapterModel, best: BestAdapter) -> BestAdapter:
    """Writes an adapter; the model has its own again afterwards.

    Raises:
        CheckpointError: If it cannot be written.
    """
    present = model.read_flat(model.adapter.parameters).copy()
    model.write_parameters(best.parameters)
    try:
        with atomic_folder(folder) as unfinished:
            model.save_adapter(unfinished)
            known = {"step": best.step, "eval_loss": best.loss}
            write_manifest(unfinished, {**known, "figure": best.figure, "aim": best.aim})
    finally:
        model.write_parameters(present)
    return replace(best, is_saved=True)


def load_best(folder: Path, model: AdapterModel, aim: str) -> BestAdapter | None:
    """The adapter that a folder holds; None without one, or with one of another aim.

    Raises:
        CheckpointError: If it is damaged, or none of this model.
    """
    if not exists(folder):
        return None
    manifest = read_manifest(folder)
    try:
        parameters = model.adapter.join(
            read_started(folder, *load_adapter(folder), model.adapter)[0]
        )
        step, loss = int(manifest["step"]), float(manifest["eval_loss"])
        figure, its_aim = manifest.get("figure", loss), manifest.get("aim", EvalConfig().aim)
        best = BestAdapter(step, loss, float(figure), str(its_aim), parameters, True)
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{folder / MANIFEST} is of no best adapter") from err
    return best if best.aim == aim else None
