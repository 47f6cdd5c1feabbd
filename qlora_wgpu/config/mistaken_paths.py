"""What lies at a path that was given for a configuration, and what to do with it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from qlora_wgpu.config.paths import DATA_SUFFIXES
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import open_file
from qlora_wgpu.presence import exists, is_dir, is_file
from qlora_wgpu.shell_words import shell_word

_YAML = (".yaml", ".yml")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ENTRIES = 1000  # of a folder that are looked at
_FIRST = 64  # bytes of a .json file, which begins data with a list


def refuse_other_than_yaml(path: Path) -> None:
    """Refuses data, a model and every folder where the path of a YAML file is needed.

    Raises:
        ConfigError: If it is one of these.
    """
    if is_dir(path):
        raise ConfigError(f"{path} is {_folder(path)}")
    suffix = path.suffix.lower()
    if not exists(path):
        return
    if suffix in _WEIGHTS:
        model = path if suffix == ".gguf" else path.parent
        raise ConfigError(f"{path} is {_model(model, 'a file of weights')}")
    if suffix in DATA_SUFFIXES and (suffix != ".json" or _is_list(path)):
        raise ConfigError(f"{path} is {_data(path, 'data')}")


def _folder(path: Path) -> str:
    names = _names_in(path)
    if files := [name for name in names if name.endswith(_YAML)]:
        file = "config.yaml" if "config.yaml" in files else min(files)
        kind = "a run's folder" if "metrics.jsonl" in names else "a folder"
        return f"{kind}: name the YAML file in it, such as {path / file}"
    if "adapter_config.json" in names:
        return (
            "an adapter's folder, not a configuration: name the YAML file of a run, and the "
            "adapter in it (lora.init_from) or beside it (eval --adapter)"
        )
    if "config.json" in names:
        return _model(path, "a model's folder")
    if any(name.lower().endswith(DATA_SUFFIXES) for name in names):
        return _data(path, "a folder of data")
    return "a folder with no YAML file in it: `qlora-wgpu init` writes one"


def _data(path: Path, kind: str) -> str:
    return f"{kind}, not a configuration: {_written_by('MODEL', shell_word(str(path)))}"


def _model(path: Path, kind: str) -> str:
    return f"{kind}, not a configuration: {_written_by(shell_word(str(path)), 'DATA')}"


def _written_by(model: str, data: str) -> str:
    return f"`qlora-wgpu init --model {model} --data {data}` writes one, run.yaml"


def _names_in(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry, _ in zip(entries, range(_ENTRIES), strict=False)]
    except OSError:
        return []


def _is_list(path: Path) -> bool:
    """Whether a JSON file holds a list; another trainer's configuration is an object."""
    if not is_file(path):
        return False
    with open_file(path) as file:
        return file.read(_FIRST).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def near_name(path: Path) -> str:
    """The end of a sentence about a file that is not there: one of almost that name, or a run's."""
    if is_file(path.with_suffix("") / "config.yaml"):
        return f": did you mean {path.with_suffix('') / 'config.yaml'}?"
    names = [
        name
        for name in _names_in(path.parent)
        if name.endswith((*_YAML, ".json")) or is_file(path.with_name(name) / "config.yaml")
    ]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {path.with_name(near[0])}?" if near else ""
