"""Tokens that other trainers add to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects.draft import Draft

_NAMED = ("bos_token", "eos_token", "unk_token")
_TRAINED = "their rows of the embedding and of the head are trained here"


def listed_tokens(value: Any) -> list[str]:
    """Tokens of a list, or of a text with commas between them."""
    given = value if isinstance(value, list) else str(value).split(",")
    return list(dict.fromkeys(token for each in given if (token := str(each).strip())))


def convert_llama_factory(draft: Draft) -> None:
    """Its ``add_tokens``, ``add_special_tokens`` (``new_special_tokens``) and ``resize_vocab``."""
    plain, special = draft.take("add_tokens"), draft.take("add_special_tokens")
    origin = "add_special_tokens"
    if special is None:
        special, origin = draft.take("new_special_tokens"), "new_special_tokens"
    tokens = listed_tokens(special or [])
    others = [token for token in listed_tokens(plain or []) if token not in tokens]
    _set(draft, "add_tokens", others, "add_tokens")
    _set(draft, "add_special_tokens", tokens, origin)
    draft.drop("resize_vocab", "the embedding has as many rows as there are tokens")


def convert_axolotl(draft: Draft) -> None:
    """Its ``tokens``, and those of ``special_tokens`` that a tokenizer may lack."""
    given = draft.take("special_tokens", {})
    if not isinstance(given, Mapping):
        draft.leave_out("special_tokens", given, "it must name each one's use")
        given = {}
    more = given.get("additional_special_tokens") or []
    named = [str(given[key]) for key in _NAMED if given.get(key)]
    tokens = list(dict.fromkeys([*named, *listed_tokens(more)]))
    plain = [token for token in listed_tokens(draft.take("tokens", [])) if token not in tokens]
    _set(draft, "add_tokens", plain, "tokens")
    _set(draft, "add_special_tokens", tokens, "special_tokens, where the tokenizer lacks them")
    if named:
        draft.notes.append(
            "special_tokens: which tokens begin and end a text stays as the tokenizer's files and "
            "the chat template say"
        )
    if (padding := given.get("pad_token")) is not None:
        reason = "padding is masked, whatever its token is"
        draft.leave_out("special_tokens.pad_token", padding, reason)


def _set(draft: Draft, key: str, tokens: list[str], origin: str) -> None:
    if tokens:
        draft.set(f"model.{key}", tokens, f"{origin}; {_TRAINED}")
