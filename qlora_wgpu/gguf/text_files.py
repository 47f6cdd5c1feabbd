"""The files of a GGUF file's text, such as tokenizer.json, in a folder of the cache."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from qlora_wgpu.cache_folder import cache_path, folder_of_this_process, is_own, make_cache_folder
from qlora_wgpu.checkpoint.atomic import atomic_folder, remove
from qlora_wgpu.checkpoint.gguf import tokenizer
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.tokenizer_files import CONFIG, GENERATION, WITHOUT_TOKENIZER
from qlora_wgpu.errors import CheckpointError, TokenizerError
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import MODEL_JSON_BYTES

_KEPT = 8  # folders of some ten megabytes


def text_folder(file: GGUFFile, config: dict[str, Any]) -> Path:
    """A folder with config.json, tokenizer.json and what else is beside weights.

    It is made once for each header and kept in the cache. Where a file's vocabulary is not read, it
    has the reason instead of a tokenizer, which names the file and is kept for nobody else.
    """
    folder = cache_path("gguf", f"{file.header_digest[:32]}-{_makers_digest()}")
    if is_own(folder):
        with suppress(OSError):
            folder.touch()  # used just now
        return folder
    contents = _contents(file, config)
    if WITHOUT_TOKENIZER in contents:
        return _temporary_folder(contents)
    try:
        make_cache_folder(folder.parent)
        _forget_oldest(folder.parent)
        with atomic_folder(folder) as unfinished:
            _write(unfinished, contents)
        return folder
    except (OSError, CheckpointError):
        return _temporary_folder(contents)


def _temporary_folder(contents: dict[str, str]) -> Path:
    """Where the cache keeps nothing."""
    made = folder_of_this_process("qlora-wgpu-gguf-")
    _write(made, contents)
    return made


@lru_cache(maxsize=1)
def _makers_digest() -> str:
    """A hash of the code that makes these files, which another version may make otherwise."""
    digest = hashlib.sha256()
    here, files = Path(__file__).parent, Path(tokenizer.__file__).parent
    for path in sorted([*here.glob("*.py"), *files.glob("*.py")]):
        digest.update(file_bytes(path, MODEL_JSON_BYTES))
    return digest.hexdigest()[:16]


def _contents(file: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    contents = {"config.json": _json(config)}
    try:
        made = tokenizer.tokenizer_files(file.metadata, file.path)
    except TokenizerError as err:
        return {**contents, WITHOUT_TOKENIZER: str(err)}
    contents["tokenizer.json"] = json.dumps(made.tokenizer, ensure_ascii=False)
    contents[CONFIG] = _json(made.config)
    if made.generation:
        contents[GENERATION] = _json(made.generation)
    return contents


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")


def _forget_oldest(cache: Path) -> None:
    """Makes room: those that were used last are kept."""
    with suppress(OSError, CheckpointError):
        folders = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime)
        for folder in folders[: -_KEPT + 1]:
            remove(folder)
