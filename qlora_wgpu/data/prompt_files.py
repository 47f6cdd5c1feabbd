"""A prompt's format and the tokenizer, beside an adapter: files that PEFT's users expect there.

``prompt_format.json`` is this package's own, and says what the others cannot: whether prompts are
turns of the chat template, Alpaca's, or text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.checkpoint.tokenizer_files import (
    CONFIG,
    GENERATION,
    PROMPT_FORMAT,
    TEMPLATE,
    TOKENS,
    copy_tokenizer,
)
from qlora_wgpu.data.chat import find_chat_template
from qlora_wgpu.data.prompt_format import PromptFormat, PromptKind
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.limits import TOKENIZER_CONFIG_BYTES
from qlora_wgpu.presence import is_there

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_prompt_files(folder: Path, base: Path, prompt: PromptFormat, name: str | None) -> None:
    """Writes the tokenizer's files, the chat template, where answers end, and the prompt's format.

    Args:
        folder: The adapter's.
        base: Folder of the base model, whose tokenizer it is.
        prompt: The format of what was trained.
        name: The template's, if it is a built-in one.

    Raises:
        CheckpointError: If a file cannot be read or written.
    """
    own = prompt.template is None or prompt.template.source == prompt.tokenizer.chat_template
    copy_tokenizer(base, folder, templates=own)
    _write(folder / CONFIG, _tokenizer_config(base, prompt, own=own))
    if not own and prompt.template is not None:
        write_file(folder / TEMPLATE, prompt.template.source.encode())
    if ends := _ends(prompt):
        _write(folder / TOKENS, {**_read(base / TOKENS), **ends})
    _write(folder / GENERATION, _generation_config(base, prompt))
    # The last: where it is, all are.
    _write(folder / PROMPT_FORMAT, {"prompt_format": prompt.kind, "chat_template": name})


def read_prompt_files(folder: Path) -> PromptFormat:
    """How prompts are written for what a folder holds: a model, or an adapter with a tokenizer.

    Where nothing says it, it is chats, with the tokenizer's template if there is one.

    Raises:
        TokenizerError: If a file of the tokenizer is damaged.
        CheckpointError: If the prompt's format is.
    """
    tokenizer, kind = Tokenizer.from_folder(folder), prompt_kind(folder)
    if kind == "alpaca":
        return PromptFormat.alpaca(tokenizer)
    if kind == "text":
        return PromptFormat.text(tokenizer)
    return PromptFormat("chat", tokenizer, find_chat_template(None, tokenizer))


def prompt_kind(folder: Path) -> PromptKind:
    """The kind of a model's or an adapter's prompts; chats where nothing says it.

    Raises:
        CheckpointError: If the file that says it is damaged.
    """
    path = folder / PROMPT_FORMAT
    if not is_there(path):
        return "chat"
    kind = read_json_object(path).get("prompt_format")
    if kind not in get_args(PromptKind):
        raise CheckpointError(f"{path}: prompt_format is {brief(kind)}, not chat, alpaca or text")
    return cast(PromptKind, kind)


def _tokenizer_config(base: Path, prompt: PromptFormat, *, own: bool) -> dict[str, Any]:
    """The tokenizer's, with the special tokens that were known by their ids alone."""
    config = _read(base / CONFIG) or {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not own:
        config.pop("chat_template", None)
    return {**prompt.tokenizer.special_tokens, **config, **_ends(prompt)}


def _ends(prompt: PromptFormat) -> dict[str, str]:
    """What ends a turn as the end-of-sequence token, where nobody would know of it otherwise."""
    end, template, tokenizer = prompt.turn_end, prompt.template, prompt.tokenizer
    if end is None or template is None or end in tokenizer.eos_token_ids:
        return {}
    if "eos_token" in template.source:  # it means another one
        return {}
    return {"eos_token": tokenizer.decode([end], skip_special_tokens=False)}


def _generation_config(base: Path, prompt: PromptFormat) -> dict[str, Any]:
    """The ids that begin and end a text: Hugging Face's programs stop at any of the latter."""
    ids = {**_read(base / "config.json"), **_read(base / GENERATION)}
    told = {name: ids[name] for name in _IDS if ids.get(name) is not None}
    ends = sorted(prompt.stop_ids)
    return {**told, "eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else told


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, TOKENIZER_CONFIG_BYTES) if is_there(path) else {}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
