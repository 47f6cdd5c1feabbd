"""A run's state on disk: the adapter as PEFT reads it, AdamW's moments, and the figures."""

from __future__ import annotations

from pathlib import Path

from qlora_wgpu.checkpoint import SafetensorsFile, atomic_folder, write_safetensors
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.state import RunState

_MOMENTS, _STATE = "optimizer.safetensors", "trainer_state.json"


def save_checkpoint(folder: Path, model: QLoRAModel, state: RunState) -> None:
    """Writes everything that a run needs to go on; the folder appears whole or not at all.

    Data order and dropout follow from the seed and the step, so they need no state.

    Args:
        folder: The checkpoint's folder.
        model: Between two steps.
        state: The run's figures.

    Raises:
        CheckpointError: If it cannot be written.
    """
    adapter = model.adapter
    with atomic_folder(folder) as unfinished:
        model.save_adapter(unfinished)
        moments = {
            f"{label}.{name}": array
            for label, flat in (
                ("exp_avg", adapter.first_moment),
                ("exp_avg_sq", adapter.second_moment),
            )
            for name, array in adapter.split(model.read_flat(flat)).items()
        }
        write_safetensors(unfinished / _MOMENTS, moments)
        (unfinished / _STATE).write_text(state.to_json(), encoding="utf-8")


def load_checkpoint(folder: Path, model: QLoRAModel) -> RunState:
    """Puts a checkpoint's adapter and moments onto the device.

    Raises:
        CheckpointError: If a file is missing or damaged, or does not fit the model; nothing has
            been put anywhere then.
    """
    adapter = model.adapter
    try:
        text = file_text(folder / _STATE, OWN_JSON_BYTES)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{folder / _STATE} cannot be read: {err}") from err
    state = RunState.from_json(text, str(folder / _STATE))
    tensors, _ = load_adapter(folder)
    parameters = adapter.join(tensors)
    with SafetensorsFile(folder / _MOMENTS) as file:
        stored = {name: file.float32(name) for name in file.names()}
    moments = []
    for label in ("exp_avg", "exp_avg_sq"):
        own = {
            n.removeprefix(f"{label}."): a for n, a in stored.items() if n.startswith(f"{label}.")
        }
        moments.append(adapter.join(own))
    model.write_parameters(parameters)
    model.write_flat(adapter.first_moment, moments[0])
    model.write_flat(adapter.second_moment, moments[1])
    return state


def load_newest(folders: list[Path], model: QLoRAModel) -> tuple[Path, RunState, list[str]]:
    """Loads the newest checkpoint that is whole.

    Args:
        folders: Checkpoints, oldest first.
        model: The model, whose adapter goes on.

    Returns:
        The checkpoint, its figures, and a sentence about each newer one that was passed over.

    Raises:
        CheckpointError: If none can be loaded.
    """
    passed: list[str] = []
    for folder in reversed(folders):
        try:
            return folder, load_checkpoint(folder, model), passed
        except CheckpointError as err:
            passed.append(f"{folder.name} is passed over: {err}")
    raise CheckpointError(
        f"no checkpoint can be loaded ({'; '.join(passed) or 'there is none'}): train without "
        "--resume, into another output.dir or with --overwrite"
    )
