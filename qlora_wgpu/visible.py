"""Untrusted text, such as data, names and generated text, for a terminal or a page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.limits import MAX_QUOTED

# Characters that a terminal or a browser interprets: C0 except tab and line feed, DEL and C1,
# direction marks, other line ends; surrogates, which cannot be encoded; and characters that are
# invisible to users, but not to a model
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_EMPTY_LINES = re.compile(r"\n(?:[^\S\n]*\n){2,}")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "WANDB_API_KEY")


def visible(text: str) -> str:
    r"""Text with control characters escaped, as ``\x1b``, except tabs and line feeds.

    Each character is escaped by itself, so text can be passed in parts.
    """
    return _CONTROL.sub(_escape, text)


def one_line(text: str) -> str:
    r"""Visible text with tabs and line feeds escaped, too, as ``\t`` and ``\n``."""
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def without_empty_lines(text: str) -> str:
    """Text with runs of empty lines collapsed, and without leading and trailing ones."""
    return _EMPTY_LINES.sub("\n\n", text).strip("\n")


def quoted(value: object) -> str:
    """A user's value in a message: quoted, on one line, and truncated."""
    text = value if isinstance(value, str) else repr(value)
    cut = text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "…"
    return f"'{one_line(cut)}'"


def without_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Text with the user's access tokens masked, which other libraries' messages may contain."""
    for name in _SECRETS:
        value = environ.get(name, "").strip()
        if len(value) >= 8:
            text = text.replace(value, "***")
    return _CREDENTIALS.sub("***", _TOKEN.sub("***", text))


def visible_json(value: Any) -> str:
    """A value as a line of JSON that is safe to print."""
    text = json.dumps(value, ensure_ascii=False)
    return _CONTROL.sub(lambda match: _utf16_escapes(match[0]), text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return r"\r" if code == 13 else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _utf16_escapes(character: str) -> str:
    raw = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{raw[i : i + 4]}" for i in range(0, len(raw), 4))
