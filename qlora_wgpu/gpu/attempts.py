"""What a driver is tried at that may take the process away: noted before it begins.

Compilers of some drivers crash where they should refuse, and nothing that they crash in can say so
afterwards. So a process that tries leaves its number in the user's cache until it has come through:
the numbers of processes that are no more are crashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.supervision.processes import is_running, own_number

CRASHES = 2  # after which it is not tried again: one may have had another cause

listeners: list[Callable[[str], None]] = []  # told what is under way, and "" when it is not


def has_crashed(what: str) -> bool:
    """Whether processes that tried this ended before they had come through, twice."""
    mark = _mark(what)
    if not is_own(mark):
        return False
    try:
        numbers = file_text(mark, OWN_JSON_BYTES).split()
    except (OSError, ValueError):
        return False
    gone = [number for number in numbers if number.isdigit() and not is_running(int(number))]
    return len(gone) >= CRASHES


@contextmanager
def attempt(what: str, doing: str) -> Iterator[None]:
    """Notes that something is tried, and that it was come through, however it turned out.

    Args:
        what: What it is, and with which driver.
        doing: What is told of it: ``"checking this driver"``.
    """
    mark = _mark(what)
    with suppress(OSError):  # without a cache a crash is not remembered
        make_cache_folder(mark.parent)
        with mark.open("a", encoding="ascii") as file:
            file.write(f"{own_number()}\n")
    try:
        with under_way(doing):
            yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


@contextmanager
def under_way(doing: str) -> Iterator[None]:
    """Tells the listeners what a crash would be a crash of."""
    _tell(doing)
    try:
        yield
    finally:
        _tell("")


def _tell(doing: str) -> None:
    for listener in listeners:
        listener(doing)


def _mark(what: str) -> Path:
    return cache_path("attempts", hashlib.sha256(what.encode()).hexdigest()[:16])
