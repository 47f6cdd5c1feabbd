"""What a merged model takes over from its adapter: tokenizer, chat template, ends of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.checkpoint.tokenizer_files import (
    GENERATION,
    PROMPT_FORMAT,
    copy_tokenizer,
    tokenizer_folder,
)
from qlora_wgpu.presence import is_there


def take_over_prompts(adapter: Path, target: Path) -> None:
    """Writes into a model's folder what an adapter was trained with, over what is there.

    Raises:
        CheckpointError: If a file cannot be read or written.
    """
    folder = tokenizer_folder(adapter)
    if folder is None:
        return
    copy_tokenizer(folder, target)
    prompt = _read(folder / PROMPT_FORMAT)
    if prompt.get("prompt_format", "chat") != "chat":  # chats are what a model has without it
        _write(target / PROMPT_FORMAT, prompt)
    ends, known = _ends(folder), _ends(target)
    # A single one is the tokenizer's own, where a model names none.
    if not ends <= known and (known or len(ends) > 1):
        _write(
            target / GENERATION,
            {**_read(target / GENERATION), "eos_token_id": sorted(ends | known)},
        )


def _ends(folder: Path) -> set[int]:
    """Ids that end a generation."""
    ids = {**_read(folder / "config.json"), **_read(folder / GENERATION)}.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return {token for token in listed if isinstance(token, int)}


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if is_there(path) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
