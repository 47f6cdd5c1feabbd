"""Measurements of a process that may be cut off: a line each, and none is repeated."""

from __future__ import annotations

import faulthandler
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ATTEMPTS = 2  # at a row whose process ended before it did
SECONDS = "GPU_ROW_SECONDS"  # the environment's: after so many a row counts as hung


class Rows:
    """A file of rows, one JSON object a line.

    A row is noted before it is measured. One that never ends, since it hangs or takes its process
    along, is tried once more and then left. A process whose row hangs is ended, and its stack told,
    where the environment says after how long; not where a script minds that itself.
    """

    def __init__(self, path: Path, *, minded: bool = False) -> None:
        self._path = path
        self._seconds = 0.0 if minded else float(os.environ.get(SECONDS) or 0)
        self._begun: Counter[str] = Counter()
        self._done: set[str] = set()
        for row in read_rows(path, begun=True):
            if "begun" in row:
                self._begun[row["key"]] += 1
            else:
                self._done.add(row["key"])

    def lack(self, key: str) -> bool:
        """Whether a row is still to be measured."""
        return key not in self._done

    def measure(self, key: str, function: Callable[[], dict[str, Any]]) -> None:
        """Adds what a function returns, or why it does not."""
        if key in self._done:
            return
        if self._begun[key] >= ATTEMPTS:
            why = f"did not end, {ATTEMPTS} times: it crashed or hung, as its log tells"
            self._add({"key": key, "failed": why})
            return
        self._add({"key": key, "begun": self._begun[key] + 1})
        if self._seconds:
            faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            row = function()
        except Exception as err:
            traceback.print_exc()
            row = {"failed": f"{type(err).__name__}: {err}"}
            if "Lost" in type(err).__name__:
                raise SystemExit(3) from err  # nothing more can be measured by this process
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._add({"key": key, **row})
        self._done.add(key)
        print(json.dumps({"key": key, **row})[:500], flush=True)

    def _add(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path, *, begun: bool = False) -> list[dict[str, Any]]:
    """All whole rows; a process may have been ended within a line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if begun or "begun" not in row:
            rows.append(row)
    return rows


def best_ways(path: Path, most: int = 10) -> Iterator[str]:
    """What an explorer found: of each shape and kind the best and the worst; what went wrong."""
    every = read_rows(path)
    failed = Counter(str(row["failed"])[:150] for row in every if "failed" in row)
    rows = [row for row in every if "tflops" in row]
    for shape, kind in dict.fromkeys((row["shape"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["shape"], row["kind"]) == (shape, kind)]
        first = own[0]["way"]
        right = sorted((r for r in own if not r["wrong"]), key=lambda row: -row["tflops"])
        yield f"{shape} {kind}: {len(own)} ways, {len(own) - len(right)} wrong"
        for row in [*right[:most], *right[most:][-1:]]:
            changed = {n: v for n, v in row["way"].items() if v != first[n]}
            yield f"  {row['tflops']:8.3f} TFLOP/s  {changed or first}"
    for why, count in failed.most_common(5):
        yield f"failed, {count} times: {why}"
