"""What a run on a cluster has left, held to what it leaves alone, and when its steps were done."""

from __future__ import annotations

import json
import re
import subprocess
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from campaigns.cluster_machines import Machines
from campaigns.support import Tally

_TIMES = re.compile("second|workers|time")


def judge(machines: Machines, out: str, tally: Tally) -> None:
    """Compares a run's adapter and losses with those of the run without a cluster."""
    wrong = [what for what in (adapter_of, rows_of) if what(machines.folder / out)
             != what(machines.folder / "alone")]  # fmt: skip
    for what in wrong:
        tally.fail(f"{out}: another {what.__name__.removesuffix('_of')}", out)
    if not wrong:
        tally.add(f"the same adapter and losses: {out}")


def adapter_of(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not _TIMES.search(k)} for row in rows]


class Progress:
    """When a run's steps were done, as its rows say.

    Attributes:
        times: By the clock of this process.
    """

    def __init__(self, rows: Path) -> None:
        self._rows = rows
        self.times: list[float] = []

    def watch(
        self, process: subprocess.Popen[Any], *, seconds: float = 120.0, until: Any = None
    ) -> None:
        """Looks until a time has passed, the process has ended or something is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None and not (until and until()):
            self._look()
            time.sleep(0.02)
        self._look()

    def longest_gap(self, since: float) -> float:
        """Seconds between two steps, the longest since a moment, the present included."""
        times = [t for t in self.times if t < since][-1:] + [t for t in self.times if t >= since]
        times.append(time.monotonic())
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def _look(self) -> None:
        with suppress(OSError):
            done = self._rows.read_bytes().count(b'"loss"')
            self.times += [time.monotonic()] * (done - len(self.times))
