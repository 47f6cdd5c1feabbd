"""A run's state on disk: the adapter as PEFT reads it, its moments, and the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import (
    SafetensorsFile,
    atomic_folder,
    read_manifest,
    write_manifest,
    write_safetensors,
)
from qlora_wgpu.errors import CheckpointError, option, reason
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.adapter_state import read_started
from qlora_wgpu.training.run_folder import step_of
from qlora_wgpu.training.state import RunState

_MOMENTS, _STATE = "optimizer.safetensors", "trainer_state.json"


def save_checkpoint(
    folder: Path, model: AdapterModel, state: RunState, identity: Mapping[str, Any]
) -> None:
    """Writes everything that a run needs to go on; the folder appears whole or not at all.

    Data order and dropout follow from the seed and the step, so they need no state.

    Args:
        folder: The checkpoint's folder.
        model: Between two steps.
        state: The run's figures.
        identity: The run's identity, which the manifest keeps.

    Raises:
        CheckpointError: If it cannot be written.
    """
    adapter = model.adapter
    with atomic_folder(folder) as unfinished:
        model.save_adapter(unfinished)
        flats = [model.read_flat(each) for each in adapter.moments.vectors]
        write_safetensors(unfinished / _MOMENTS, adapter.moments.split(flats))
        (unfinished / _STATE).write_text(state.to_json(), encoding="utf-8")
        write_manifest(unfinished, {"step": state.step, **identity})


def load_checkpoint(
    folder: Path, model: AdapterModel, refuse_other: Callable[[Mapping[str, Any]], None]
) -> RunState:
    """Puts a checkpoint's adapter and moments onto the device.

    Args:
        folder: The checkpoint's folder.
        model: The model, whose adapter goes on.
        refuse_other: Raises an error if the manifest is another run's.

    Raises:
        CheckpointError: If a file is missing, damaged or of another step, or does not fit the
            model; nothing has been put anywhere then.
        ConfigError: If ``refuse_other`` says so.
    """
    manifest = read_manifest(folder)
    refuse_other(manifest)
    state = _read_state(folder / _STATE)
    if not state.step == manifest["step"] == step_of(folder):
        raise CheckpointError(f"{folder} holds the state after step {state.step}")
    adapter = model.adapter
    parameters = adapter.join(read_started(folder, *load_adapter(folder), adapter)[0])
    moments = _read_moments(folder / _MOMENTS, adapter)
    model.write_parameters(parameters)
    for moment, values in zip(adapter.moments.vectors, moments, strict=True):
        model.write_flat(moment, values)
    return state


def start_of(folders: list[Path]) -> Mapping[str, npt.NDArray[np.float32]] | None:
    """What a run's adapter began as, if that is a part of its base; by one of its checkpoints.

    Args:
        folders: Checkpoints, oldest first.
    """
    for folder in reversed(folders):
        with suppress(CheckpointError):
            started = started_in(folder, *load_adapter(folder))
            return None if started is None else started.start
    return None


def _read_state(path: Path) -> RunState:
    try:
        text = file_text(path, OWN_JSON_BYTES)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path} cannot be read: {reason(err)}") from err
    return RunState.from_json(text, str(path))


def _read_moments(path: Path, adapter: Adapter) -> list[npt.NDArray[Any]]:
    with SafetensorsFile(path) as file:
        return adapter.moments.join({name: file.raw(name) for name in file.names()})


def load_newest(
    folders: list[Path], model: AdapterModel, refuse_other: Callable[[Mapping[str, Any]], None]
) -> tuple[Path, RunState, list[str]]:
    """Loads the newest checkpoint that is whole.

    Args:
        folders: Checkpoints, oldest first.
        model: The model, whose adapter goes on.
        refuse_other: Raises an error if a whole one is another run's.

    Returns:
        The checkpoint, its figures, and a sentence about each newer one that was passed over.

    Raises:
        CheckpointError: If none can be loaded.
        ConfigError: If ``refuse_other`` says so.
    """
    passed: list[str] = []
    for folder in reversed(folders):
        try:
            return folder, load_checkpoint(folder, model, refuse_other), passed
        except CheckpointError as err:
            passed.append(f"{folder.name} is passed over: {err}")
    raise CheckpointError(
        f"no checkpoint can be loaded ({'; '.join(passed) or 'there is none'}): train without "
        f"{option('resume')}, into another output.dir or with {option('overwrite')}"
    )
