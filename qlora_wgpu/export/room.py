"""Whether a disk has room for what is about to be written, which may take hours."""

from __future__ import annotations

import shutil
from pathlib import Path

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.presence import exists

MARGIN = 1 << 20
"""Bytes for what is written beside weights and is not counted: headers and indexes."""


def refuse_without_room(parent: Path, needed: int, what: str, advice: str) -> None:
    """Makes sure that a disk has room, before anything is computed or written.

    Args:
        parent: The folder that will hold it; it need not be there yet.
        needed: Bytes that will be written.
        what: It, for a message.
        advice: What a user can do where there is no room.

    Raises:
        CheckpointError: If there is none.
    """
    place = parent.absolute()
    while not exists(place) and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has room for {free / 1e6:,.1f} MB, but {what} takes "
            f"{needed / 1e6:,.1f} MB: {advice}"
        )
