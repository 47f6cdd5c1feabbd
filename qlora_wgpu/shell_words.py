"""Quoting of commands in messages, so that they can be pasted into a shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

_PLAIN = re.compile(r"[\w./\\:=+~-]+")  # in cmd.exe and PowerShell
_BEFORE_A_QUOTE = re.compile(r'(\\*)("|$)')  # where backslashes are special


def shell_word(word: str, *, windows: bool = os.name == "nt") -> str:
    """A word, quoted if necessary; cmd.exe only knows double quotes."""
    if not windows:
        return shlex.quote(word)
    if _PLAIN.fullmatch(word):
        return word
    escaped = _BEFORE_A_QUOTE.sub(lambda m: m[1] * 2 + (r"\"" if m[2] else ""), word)
    return f'"{escaped}"'


def shell_command(words: Iterable[str], *, windows: bool = os.name == "nt") -> str:
    """A command, its words quoted if necessary."""
    return " ".join(shell_word(word, windows=windows) for word in words)
