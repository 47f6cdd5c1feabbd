"""What the processes that a test started take of the machine's memory."""

import os
import threading
from pathlib import Path
from typing import Self


class PeakMemory:
    """Watches all descendants of this process, from entering to leaving.

    Attributes:
        nbytes: The most that they took together, what they share counted once.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.nbytes = max(self.nbytes, sum(map(_share, _descendants(os.getpid()))))


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended
        children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], children.get(root, [])
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def _share(process: int) -> int:
    """Its own memory, and its share of what it has together with others."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
