"""Text of others, such as data, names and what a model says, for a terminal or a page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.limits import MAX_QUOTED

# What a terminal or a browser obeys instead of showing it: C0 but tab and line feed, DEL and C1,
# marks that change the direction of writing, other ends of lines; half characters, which cannot be
# written; and characters that no glyph shows but a model reads.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_EMPTY_LINES = re.compile(r"\n(?:[^\S\n]*\n){2,}")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "WANDB_API_KEY")


def visible(text: str) -> str:
    r"""Text whose control characters are shown, as ``\x1b``, instead of obeyed.

    Tabs and line feeds stay. Every character is replaced by itself, so a text may come in parts.
    """
    return _OBEYED.sub(_escape, text)


def one_line(text: str) -> str:
    r"""Visible text with its line feeds and tabs shown, too, as ``\n`` and ``\t``."""
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def without_empty_lines(text: str) -> str:
    """Text with one empty line where several follow each other, and none around it."""
    return _EMPTY_LINES.sub("\n\n", text).strip("\n")


def quoted(value: object) -> str:
    """What the user wrote, for a message: in quotes, on one line, and cut where it is long."""
    text = value if isinstance(value, str) else repr(value)
    cut = text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "…"
    return f"'{one_line(cut)}'"


def without_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Text without the tokens of the user's accounts, which messages of others may hold."""
    for name in _SECRETS:
        value = environ.get(name, "").strip()
        if len(value) >= 8:
            text = text.replace(value, "***")
    return _CREDENTIALS.sub("***", _TOKEN.sub("***", text))


def visible_json(value: Any) -> str:
    """A value as JSON on one line, which a terminal shows and a program reads as it is."""
    text = json.dumps(value, ensure_ascii=False)
    return _OBEYED.sub(lambda match: _utf16_escapes(match[0]), text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return r"\r" if code == 13 else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _utf16_escapes(character: str) -> str:
    raw = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{raw[i : i + 4]}" for i in range(0, len(raw), 4))
