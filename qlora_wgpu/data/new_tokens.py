"""Tokens that a run adds to its base's tokenizer, as ``tokenizer.add_tokens`` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.cache_folder import folder_of_this_process
from qlora_wgpu.checkpoint.tokenizer_files import CONFIG, GENERATION, copy_tokenizer
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import ConfigError, TokenizerError
from qlora_wgpu.files import file_bytes, is_there
from qlora_wgpu.limits import MODEL_JSON_BYTES, TOKENIZER_BYTES, TOKENIZER_CONFIG_BYTES


@dataclass(frozen=True)
class ExtendedTokenizer:
    """A tokenizer's folder with tokens added."""

    folder: Path  # the folder, for as long as the process runs
    new_tokens: tuple[int, ...]  # the ids of those that the tokenizer did not have
    count: int  # how many tokens it has now, if they are numbered without a gap


def extended_tokenizer(
    folder: Path, tokens: Sequence[str], special_tokens: Sequence[str]
) -> ExtendedTokenizer:
    """Adds tokens to a tokenizer; those that it has stay what they are."""
    path = folder / "tokenizer.json"
    if not is_there(path):
        raise TokenizerError(f"{folder} has no tokenizer.json, so no tokens can be added")
    try:
        stored: dict[str, Any] = json.loads(file_bytes(path, TOKENIZER_BYTES))
        added = list(stored.get("added_tokens") or [])
        texts = {*_vocabulary(stored), *(token["content"] for token in added)}
        first = max([len(_vocabulary(stored)), *(int(token["id"]) + 1 for token in added)])
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise TokenizerError(f"{path} is not a tokenizer that can be read: {err}") from err
    named = [(text, False) for text in tokens] + [(text, True) for text in special_tokens]
    for i, (text, _) in enumerate(named):
        if text in (other for other, _ in named[:i]):
            raise ConfigError(f"model.add_tokens and add_special_tokens name {text!r} twice")
    new = [
        _token(first + i, text, special=special)
        for i, (text, special) in enumerate(each for each in named if each[0] not in texts)
    ]
    stored["added_tokens"] = added + new
    made = _folder_with(folder, stored, new)
    ids = tuple(int(token["id"]) for token in new)
    return ExtendedTokenizer(made, ids, first + len(new))


def _vocabulary(stored: dict[str, Any]) -> list[str]:
    """Texts of the model's own tokens: a mapping's keys, or of Unigram pairs with scores."""
    vocabulary = stored["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return list(vocabulary)
    return [str(text) for text, _ in vocabulary]


def _token(number: int, text: str, *, special: bool) -> dict[str, Any]:
    """As Hugging Face's AddedToken is by default."""
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not special,
        "special": special,
    }


def _folder_with(source: Path, stored: dict[str, Any], new: list[dict[str, Any]]) -> Path:
    folder = folder_of_this_process("qlora-wgpu-tokens-")
    copy_tokenizer(source, folder)
    for name in ("config.json", GENERATION):
        if is_there(source / name):
            (folder / name).write_bytes(file_bytes(source / name, MODEL_JSON_BYTES))
    _write(folder / "tokenizer.json", stored)
    if is_there(folder / CONFIG):
        config = read_json_object(folder / CONFIG, TOKENIZER_CONFIG_BYTES)
        if isinstance(config.get("added_tokens_decoder"), dict):
            for token in new:
                config["added_tokens_decoder"][str(token["id"])] = {
                    key: value for key, value in token.items() if key != "id"
                }
            _write(folder / CONFIG, config)
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
