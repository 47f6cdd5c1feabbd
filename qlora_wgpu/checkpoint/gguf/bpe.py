"""Byte-pair encoding as tokenizer.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bpe_model(vocab: Mapping[str, int], merges: list[Any], **more: Any) -> dict[str, Any]:
    """tokenizer.json's ``model``.

    Args:
        vocab: Ids by text.
        merges: Pairs that are joined, first things first.
        more: What is otherwise than usual.
    """
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bool(more.get("byte_fallback")),
        "byte_fallback": False,
        "ignore_merges": False,
        **more,
        "vocab": vocab,
        "merges": merges,
    }


def halves(merge: str) -> tuple[str, str] | None:
    """The two that a merge joins; a space may be a part of the first."""
    left, space, right = merge[1:].partition(" ")
    return (merge[:1] + left, right) if space and right else None
