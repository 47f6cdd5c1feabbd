"""Finds a base and an adapter from what a user names: a run, an adapter or a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.hub import is_hub_file, is_hub_model, owner_hint
from qlora_wgpu.checkpoint.model_folder import GGUF
from qlora_wgpu.config import Config, ModelConfig, QuantConfig, load_config
from qlora_wgpu.config.loading import config_of_run, find_run, without_none
from qlora_wgpu.config.paths import RunPaths, path_hint
from qlora_wgpu.errors import ConfigError, command, option
from qlora_wgpu.files import exists, is_dir, is_file
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.qlora_model import ComputeDtype
from qlora_wgpu.runs.opening import OpenedModel, load_adapted, opened_as_trained
from qlora_wgpu.runs.prompts import prompt_for
from qlora_wgpu.training import Observer, checkpoint_folders
from qlora_wgpu.training.observers import Unwatched

# ---- what a user names ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelRef:
    """A base, and the adapter to open on it."""

    model: str  # folder or hub name of the base
    adapter: str | None  # folder of the adapter, or None for the base alone


def resolve_model(
    place: str | None, model: str | None = None, adapter: str | None = None
) -> ModelRef:
    """The base and adapter of a run, an adapter or a model, completed by the two options."""
    if place is not None and adapter is not None:
        raise ConfigError(f"{place} and --adapter {adapter} both name an adapter: leave one out")
    if place is not None and (own := adapter_in(place)) is not None:
        adapter = own
    elif place is not None and model is not None:
        raise ConfigError(f"{place} and --model {model} both name a model: leave one out")
    else:
        model = model or place
    if model is not None:
        return ModelRef(model, adapter)
    if adapter is None:
        raise ConfigError("a run's folder, such as runs/first, or a model (--model) is required")
    return ModelRef(existing_base(adapter), adapter)


def adapter_of_run(run: Path) -> str:
    """The final adapter of a run, else that of its newest checkpoint."""
    final = RunPaths(run).adapter
    if _holds_adapter(final):
        return str(final)
    checkpoints = [folder for folder in checkpoint_folders(run) if _holds_adapter(folder)]
    if not checkpoints:
        raise ConfigError(f"the run in {run} has no adapter and no checkpoint yet")
    return str(checkpoints[-1])


def base_of(adapter: str) -> str:
    """The base named by an adapter's run, or else by the adapter itself."""
    if (run := find_run(adapter)) is not None:
        return config_of_run(run).model.path
    name = load_adapter(adapter, biases=True)[1].base_model_name_or_path
    if name is None:
        raise ConfigError(f"{adapter} names no base model: set it with {option('model', ...)}")
    return name


def existing_base(adapter: str) -> str:
    """``base_of`` an adapter; an error if it does not exist."""
    base = base_of(adapter)
    if is_nowhere(base):
        raise ConfigError(
            f"{adapter} was trained on the model {base}, which does not exist: set it with "
            f"{option('model', ...)}"
        )
    return base


def base_in(settings: Config) -> str:
    """The base of a configuration; an error with a hint if it does not exist."""
    path = settings.model.path
    if is_nowhere(path):
        if is_file(Path(path).expanduser()):
            raise ConfigError(
                f"model.path is the file {path}: set it to the file's folder, or to a .gguf file"
            )
        set_it = "add model.path=FOLDER" if command() else "set model.path to its folder"
        hint = path_hint(Path(path).expanduser()) or _similar_model(Path(path))
        if not hint:
            hint = f"if it has moved, {set_it}"
            if wanted := owner_hint(path):
                hint += f"; {wanted}"
        raise ConfigError(f"model folder {path} does not exist: {hint}")
    return path


def adapter_in(place: str) -> str | None:
    """The adapter in a run's or an adapter's folder; None if ``place`` is a model."""
    folder = Path(place).expanduser()
    if _holds_adapter(folder):
        return str(folder)
    if _is_gguf(folder) or exists(folder / "config.json") or _is_on_the_hub(place):
        return None
    if _is_run(folder):
        return adapter_of_run(folder)
    run = _similar_run(folder)
    hint = "" if run is None else f": did you mean {run}?"
    named = place or "''"
    raise ConfigError(f"there is no run, adapter or model in {named}{hint}")


def _is_on_the_hub(place: str) -> bool:
    """Whether a name can be on the hub; ``runs/frist`` next to ``runs/first`` cannot."""
    folder = Path(place).expanduser()
    if is_hub_file(place):
        return not exists(folder)
    return is_hub_model(place) and not exists(folder) and not _runs_in(folder.parent)


def _similar_run(place: Path) -> Path | None:
    """The run of a configuration file, above or in a folder, or of a similar name."""
    parents = [folder for folder in place.parents if _is_run(folder)]
    found = parents or _run_of_config(place) or _runs_in(place)
    if not found:
        names = [run.name for run in _runs_in(place.parent)]
        close = get_close_matches(place.name, names, cutoff=0.5)
        found = [place.with_name(name) for name in close]
    return found[0] if found else None


def _run_of_config(config: Path) -> list[Path]:
    if not is_file(config):
        return []
    try:
        run = Path(load_config(config).output.dir)
    except ConfigError:  # not a configuration
        return []
    return [run] if _is_run(run) else []


def _runs_in(folder: Path) -> list[Path]:
    return sorted(filter(_is_run, folder.iterdir())) if is_dir(folder) else []


def _is_run(folder: Path) -> bool:
    return exists(RunPaths(folder).adapter) or exists(RunPaths(folder).metrics)


def _holds_adapter(folder: Path) -> bool:
    return is_file(folder / "adapter_config.json")


def _similar_model(path: Path) -> str:
    """A hint at a model of a similar name in the same folder; may be empty."""
    folder = path.expanduser().parent
    if not is_dir(folder):
        return ""
    models = [entry.name for entry in folder.iterdir() if is_file(entry / "config.json")]
    near = get_close_matches(path.name, models, n=1)
    return f"did you mean {path.with_name(near[0])}?" if near else ""


def is_nowhere(base: str) -> bool:
    """Whether a base is neither a folder nor a GGUF file nor a name on the hub."""
    path = Path(base).expanduser()
    return not (is_dir(path) or _is_gguf(path) or is_hub_model(base) or is_hub_file(base))


def _is_gguf(path: Path) -> bool:
    return path.suffix == GGUF and is_file(path)


# ---- opening -------------------------------------------------------------------------------------


def open_adapter(
    adapter: str | PathLike[str],
    model: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    *,
    quant: QuantConfig | None = None,
    compute_dtype: ComputeDtype | None = None,
    gpu: str | None = None,
    backend: str | None = None,
    memory: str | int | None = None,
) -> QLoRAModel:
    """Opens an adapter on its base as it was trained: with the settings of its run, if it has one.

    Args:
        adapter: Folder of a run, or of a PEFT adapter such as one of a run's checkpoints.
        model: Folder or hub name of the base; by default the one named by the run or the adapter.
        observer: Gets notes and progress; a note if the training settings are unknown.
        quant: How the base's linear layers are stored, instead of the run's setting.
        compute_dtype: Element type of matmul operands, instead of the run's.
        gpu: The GPU, instead of the run's.
        backend: The WebGPU implementation, instead of the run's.
        memory: Device memory to use, such as ``"8GiB"``, instead of the run's; layers that do not
            fit are offloaded to host memory.
    """
    observer = observer or Unwatched()
    adapter = adapter_in(str(adapter)) or str(adapter)
    given = {
        "quant": {} if quant is None else quant.model_dump(),
        "train": {"compute_dtype": compute_dtype},
        "device": {"gpu": gpu, "backend": backend, "memory": memory},
    }
    settings = settings_of_adapter(adapter, model, observer, given)
    source = OpenedModel.open(settings.model.path)
    opened = load_adapted(source, adapter, settings, observer)
    opened.read_prompts = partial(prompt_for, source)
    return opened


def settings_of_adapter(
    adapter: str, model: str | PathLike[str] | None, observer: Observer,
    given: Mapping[str, Mapping[str, Any]],
) -> Config:  # fmt: skip
    """The settings of an adapter's run, but for those that are given and not None."""
    settings = Config(model=ModelConfig(path=str(model or existing_base(adapter))))
    memory = given["device"]["memory"]
    if memory is not None:
        checked = {"model": {"path": "."}, "device": {"memory": memory}}
        memory = Config.model_validate(checked).device.memory
    device = {**given["device"], "memory": memory}
    return opened_as_trained(settings, adapter, observer, without_none({**given, "device": device}))
