"""Sizes in bytes as people write them: GB are 10⁹ and GiB 2³⁰."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter

_BYTE_SIZE = TypeAdapter(ByteSize)
LEAST_ALONE = 1024
"""Bytes that a number without a unit may be: below it, a unit was forgotten."""


def parse_bytes(text: str) -> int | None:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` 8 · 10^9, or None.

    A number alone counts bytes, and is none below ``LEAST_ALONE``.
    """
    # Pydantic alone would take "8GiB or so" and "8Gbit".
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if size is None:
        return None
    if size[0].strip().isdigit() and int(size[0]) < LEAST_ALONE:
        return None
    return int(_BYTE_SIZE.validate_python(f"{size[1]}{size[2] or ''}b"))
