"""Sizes in bytes as people write them: GB are 10⁹ and GiB 2³⁰."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter

_BYTE_SIZE = TypeAdapter(ByteSize)


def parse_bytes(text: str) -> int | None:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` 8 · 10^9, or None."""
    # Pydantic alone would take "8GiB or so" and "8Gbit".
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if size is None:
        return None
    return int(_BYTE_SIZE.validate_python(f"{size[1]}{size[2] or ''}b"))
