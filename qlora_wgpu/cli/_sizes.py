"""Numbers on the command line, with a sentence for wrong ones."""

from __future__ import annotations

from qlora_wgpu.config.byte_size import parse_bytes
from qlora_wgpu.errors import ConfigError, brief

MOST_PORTS = 65_535


def whole_number(option: str, text: str, most: int | None = None) -> int:
    """A whole number above zero.

    Raises:
        ConfigError: If the text is none, or more than it may be.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{option} must be a whole number above zero, got {brief(text)}")
    if most is not None and value > most:
        raise ConfigError(f"{option} must be at most {most:,}, got {brief(value)}")
    return value


def read_bytes(option: str, text: str) -> int:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` are 8 · 10^9.

    Raises:
        ConfigError: If the text is none.
    """
    size = parse_bytes(text)
    if not size:
        raise ConfigError(f"{option} must be a size such as 8GiB or 500MiB, got {text!r}")
    return size
