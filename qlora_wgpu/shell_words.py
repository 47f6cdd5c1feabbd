"""Words of commands that a message offers to be copied, as the reader's shell reads them back."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

_PLAIN = re.compile(r"[\w./\\:=+~-]+")  # to cmd.exe and PowerShell alike
_BEFORE_A_QUOTE = re.compile(r'(\\*)("|$)')  # where a backslash is none of the text


def shell_word(word: str, *, windows: bool = os.name == "nt") -> str:
    """A word, quoted where it needs that; cmd.exe knows double quotes alone."""
    if not windows:
        return shlex.quote(word)
    if _PLAIN.fullmatch(word):
        return word
    escaped = _BEFORE_A_QUOTE.sub(lambda m: m[1] * 2 + (r"\"" if m[2] else ""), word)
    return f'"{escaped}"'


def shell_command(words: Iterable[str], *, windows: bool = os.name == "nt") -> str:
    """A whole command, its words quoted where they need that."""
    return " ".join(shell_word(word, windows=windows) for word in words)
