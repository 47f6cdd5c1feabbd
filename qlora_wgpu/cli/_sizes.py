"""Numbers on the command line, with a sentence for wrong ones."""

from __future__ import annotations

import re

from qlora_wgpu.errors import ConfigError

_UNITS = {"": 1, "b": 1, "k": 10, "ki": 10, "m": 20, "mi": 20, "g": 30, "gi": 30, "t": 40, "ti": 40}


def whole_number(option: str, text: str) -> int:
    """A whole number above zero.

    Raises:
        ConfigError: If the text is none.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{option} must be a whole number above zero, got {text!r}")
    return value


def read_bytes(option: str, text: str) -> int:
    """A size such as ``8GiB``, ``8G`` or ``500MB`` in bytes; all units are powers of 1,024.

    Raises:
        ConfigError: If the text is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*?)b?\s*", text.lower())
    if match is None or match.group(2) not in _UNITS:
        raise ConfigError(f"{option} must be a size such as 8GiB or 500MiB, got {text!r}")
    unit = _UNITS[match.group(2)]
    return int(float(match.group(1)) * (1 if unit == 1 else 2**unit))
