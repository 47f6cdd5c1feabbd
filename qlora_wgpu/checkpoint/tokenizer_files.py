"""The files of a tokenizer and its chat templates, and copies of them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.config.loading import find_run
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import file_bytes, is_there
from qlora_wgpu.limits import TOKENIZER_BYTES

CONFIG = "tokenizer_config.json"
TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
PROMPT_FORMAT = "prompt_format.json"  # of this package: chat, alpaca or text
WITHOUT_TOKENIZER = "no-tokenizer.txt"  # the reason why a model has no tokenizer.json
MORE_TEMPLATES = "additional_chat_templates"
_FILES = ("tokenizer.json", CONFIG, TOKENS, "added_tokens.json")


def tokenizer_folder(adapter: str | PathLike[str]) -> Path | None:
    """The folder with an adapter's tokenizer: its own, or that of its run's final adapter."""
    folders = [Path(adapter).expanduser()]
    if (run := find_run(adapter)) is not None:
        folders.append(RunPaths(run).adapter)
    return next((folder for folder in folders if is_there(folder / "tokenizer.json")), None)


def copy_tokenizer(source: Path, target: Path, *, templates: bool = True) -> None:
    """Copies a folder's tokenizer and templates into another folder, replacing existing files."""
    names = [*_FILES, TEMPLATE] if templates else _FILES
    for name in names:
        if is_there(source / name):
            write_file(target / name, _content(source / name))
    if templates:
        copy_more_templates(source, target)


def copy_prompt_files(source: Path, target: Path) -> None:
    """Copies everything that a prompt format is read from."""
    copy_tokenizer(source, target)
    for name in (GENERATION, PROMPT_FORMAT):
        if is_there(source / name):
            write_file(target / name, _content(source / name))


def copy_more_templates(source: Path, target: Path) -> None:
    """Copies a model's additional chat templates."""
    for path in sorted((source / MORE_TEMPLATES).glob("*.jinja")):
        copy = target / MORE_TEMPLATES / path.name
        copy.parent.mkdir(exist_ok=True)
        write_file(copy, _content(path))


def _content(path: Path) -> bytes:
    try:
        return file_bytes(path, TOKENIZER_BYTES)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from err
