"""Numbers on the command line, with a sentence for wrong ones."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter

from qlora_wgpu.errors import ConfigError

_BYTE_SIZE = TypeAdapter(ByteSize)


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
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` are 8 · 10^9.

    Raises:
        ConfigError: If the text is none.
    """
    # Pydantic alone would take "8GiB or so" and "8Gbit".
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if size is None:
        raise ConfigError(f"{option} must be a size such as 8GiB or 500MiB, got {text!r}")
    return int(_BYTE_SIZE.validate_python(f"{size[1]}{size[2] or ''}b"))
