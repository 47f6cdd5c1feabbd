"""What explorers of kernels share: compiling ahead, verifying, timing, and resuming.

A candidate is timed at the first size of each group, and at the others only if it is within 1.5
times the best of its kind. Pipelines are compiled on all cores while the GPU measures.

Dawn takes 6 to 16 ms of a core for a kernel, and a card's driver about 1 s, as nvcc does: 0.1 s on
16 cores. A size costs 25 ms of warm-up before 2 timed dispatches of at most 1.6 ms (at 300
TFLOP/s), and twice that near the best: 0.2 s for a product, 0.1 s for attention. So 8 minutes
suffice for 2,000 kernels, and still for 300 if the driver compiles one at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gpu_rows import Rows, best_ways, read_rows

from qlora_wgpu.bench.timing import DispatchTimer, clock_of, has_timestamps
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import most_invocations
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

NEAR = 1.5  # times the best; slower candidates are not timed further
_AHEAD = 2  # pipelines per core that are compiled ahead
_FIRST_ROUNDS, _MORE_ROUNDS = 2, 4
_FEW_THREADS = 256  # resident on a multiprocessor: too few to hide latency


class Problem(Protocol):
    """One size at which candidates are compared."""

    flops: float

    def dispatch(self, way: Any, pipeline: Any, *, verifies: bool) -> Dispatch: ...
    def errors(self, way: Any) -> dict[str, Any]:
        """Of the last dispatch: ``wrong`` is how many results are beyond their bound."""


@dataclass(frozen=True)
class Candidate:
    """A kernel and where it is measured.

    Attributes:
        name: Of the kernel among all: the key of its rows and of its registers.
        kind: Candidates of one kind compute the same.
        way: A dataclass of what was chosen.
        source: Makes its WGSL.
        sizes: Groups of problems' names, with what makes them; the first of a group decides whether
            the others are measured.
    """

    name: str
    kind: str
    way: Any
    source: Callable[[], str]
    sizes: Sequence[Sequence[tuple[str, Callable[[], Problem]]]]


class Bench:
    """A device, and how kernels are compiled and bound on it."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def described(self, code: str, size: int = 0) -> dict[str, Any]:
        """A pipeline of WGSL, with this subgroup size if the device can be asked for one."""
        device = self.device
        sized = size if "subgroup-size-control" in device.features else 0
        module = device.backend.compile(device.raw, device.backend.dialect(code, sized), "explore")
        return {"layout": "auto", "compute": {"module": module, "entry_point": "main"}}

    def compiled(self, code: str, size: int = 0) -> Any:
        return self.device.raw.create_compute_pipeline(**self.described(code, size))

    def buffer(self, array: np.ndarray) -> Any:
        buffer = self.device.buffer(max(array.nbytes, 16), "explore", bound=False)
        self.device.write(buffer, array)
        return buffer

    def bound(self, pipeline: Any, own: dict[int, Any]) -> Any:
        entries = [
            {"binding": index, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
            for index, buffer in own.items()
        ]
        layout = pipeline.get_bind_group_layout(0)
        return self.device.raw.create_bind_group(layout=layout, entries=entries)


class Explorer(Bench):
    """A device with matrix units for f16."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        shapes = device.backend.matrix_shapes(device.gpu)
        units = [shape for shape in shapes if shape.element == "f16"]
        if not units:
            raise SystemExit(f"{device.name} has no matrix units for f16 through this backend")
        self.unit: MatrixShape = units[0]
        self.limits = Limits(
            most_invocations(device.raw.limits),
            int(device.raw.limits["max-compute-workgroup-storage-size"]),
        )

    def started(self, candidate: Candidate) -> Callable[[], Any]:
        """Starts to compile it; the result waits for its pipeline, or tells why there is none.

        Dawn compiles in threads of its own. It must not be called from several.
        """
        try:
            described = self.described(candidate.source(), self.unit.threads)
            promise = self.device.raw.create_compute_pipeline_async(**described)
        except Exception as err:
            why = _why(err)
            return lambda: why

        def finished() -> Any:
            try:
                return promise.sync_wait()
            except Exception as err:
                return _why(err)

        return finished


def _why(err: Exception) -> str:
    return str(err)[:300] or type(err).__name__


class Campaign:
    """Measures candidates until the time is over, and continues what an earlier call left."""

    def __init__(self, explorer: Explorer, path: Path, near: float = NEAR) -> None:
        self._explorer, self._near = explorer, near
        self._rows = Rows(path)
        self._known = {row["key"]: row for row in read_rows(path)}
        self._best: dict[tuple[str, str], float] = {}
        self.seconds: dict[str, float] = {}  # of the main thread, by what it did
        for row in self._known.values():
            self._note(row)
        self._clock = _clock(explorer)

    def run(self, candidates: Sequence[Candidate], end: float) -> int:
        """How many candidates were tried when it ended, with those of earlier calls."""
        todo = [candidate for candidate in candidates if any(map(len, self._left(candidate)))]
        tried = len(candidates) - len(todo)
        ahead = self._compiled_ahead(todo)
        while time.monotonic() < end:
            with self._spends("compiling"):
                following = next(ahead, None)
            if following is None:
                break
            self._measure(*following)
            tried += 1
        return tried

    def _compiled_ahead(self, candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, Any]]:
        waiting: deque[tuple[Candidate, Callable[[], Any]]] = deque()
        for candidate in candidates:
            waiting.append((candidate, self._explorer.started(candidate)))
            if len(waiting) > _AHEAD * (os.cpu_count() or 1):
                first, finished = waiting.popleft()
                yield first, finished()
        for first, finished in waiting:
            yield first, finished()

    def _left(self, candidate: Candidate) -> Iterator[Sequence[tuple[str, Callable[[], Problem]]]]:
        """Of each group the sizes not measured yet, or none where a slow one decided."""
        for group in candidate.sizes:
            known = [row for name, _ in group if (row := self._row_of(candidate, name))]
            yield group[len(known) :] if all(map(self._is_near, known)) else ()

    def _row_of(self, candidate: Candidate, size: str) -> dict[str, Any] | None:
        return self._known.get(f"{candidate.name} @ {size}")

    def _measure(self, candidate: Candidate, pipeline: Any) -> None:
        for group in self._left(candidate):
            for name, make in group:
                with self._spends("preparing"):
                    problem = make()
                measure = partial(self._row, candidate, name, problem, pipeline)
                self._rows.measure(f"{candidate.name} @ {name}", measure)
                row = self._row_of(candidate, name)
                if row is None or not self._is_near(row):
                    break

    def _row(
        self, candidate: Candidate, size: str, problem: Problem, pipeline: Any
    ) -> dict[str, Any]:
        way = candidate.way
        about = {"shape": size, "kind": candidate.kind, "way": asdict(way)}
        row: dict[str, Any] = {"failed": pipeline, **about}
        if not isinstance(pipeline, str):
            with self._spends("verifying"):
                self._explorer.device.dispatch(*problem.dispatch(way, pipeline, verifies=True))
                found = problem.errors(way)
            with self._spends("timing"):
                dispatch = problem.dispatch(way, pipeline, verifies=False)
                seconds = min(self._clock([dispatch] * _FIRST_ROUNDS))
                if self._is_near({**about, "seconds": seconds}):
                    seconds = min(seconds, *self._clock([dispatch] * _MORE_ROUNDS))
            row = {**found, "seconds": seconds, "tflops": problem.flops / seconds / 1e12, **about}
        self._known[f"{candidate.name} @ {size}"] = row
        self._note(row)
        return row

    def _note(self, row: dict[str, Any]) -> None:
        if "seconds" in row and not row.get("wrong"):
            place = row["kind"], row["shape"]
            self._best[place] = min(self._best.get(place, math.inf), row["seconds"])

    def _is_near(self, row: dict[str, Any]) -> bool:
        """Whether it is worth measuring further: right, and not far from the best of its kind."""
        if "seconds" not in row or row.get("wrong"):
            return False
        best = self._best.get((row["kind"], row["shape"]), math.inf)
        return bool(row["seconds"] <= self._near * best)

    @contextmanager
    def _spends(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - begin


def _clock(bench: Bench) -> Callable[[Sequence[Dispatch]], list[float]]:
    """Times dispatches on a busy GPU, all of them after one warm-up where it has timestamps."""
    device = bench.device
    if has_timestamps(device):
        timer = DispatchTimer(device)
        timer.load.raise_clock()
        return lambda dispatches: timer.seconds(dispatches, [0.0] * len(dispatches))
    seconds_of = clock_of(device, bench.buffer(np.zeros(4, np.uint32)))
    return lambda dispatches: [seconds_of(dispatch) for dispatch in dispatches]


def ordered(candidates: Sequence[Candidate], registers: Path | None) -> list[Candidate]:
    """Today's kernel first, and last those that a compiler expects to be slow.

    Args:
        candidates: All of them.
        registers: A file of ``explore_ptxas.py``; without it their order stays.
    """
    if registers is None:
        return list(candidates)
    known = json.loads(registers.read_text(encoding="utf-8"))["kernels"]

    def rank(candidate: Candidate) -> int:
        found = known.get(candidate.name, {})
        if found.get("spilled"):
            return 2
        return int(found.get("resident_threads", _FEW_THREADS) < _FEW_THREADS)

    return [*candidates[:1], *sorted(candidates[1:], key=rank)]


def in_turns(lists: Iterable[Sequence[Candidate]]) -> list[Candidate]:
    """One of each list after the other; those that compute no size are left out."""
    turns = [each for turn in zip_longest(*lists) for each in turn if each]
    return [candidate for candidate in turns if candidate.sizes]


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a software GPU")
    parser.add_argument("--count", type=int, help="try this many ways at most")
    parser.add_argument("--registers", type=Path, help="figures of explore_ptxas.py, for the order")
    parser.add_argument("--backend", default="dawn")
    return parser


def explored(
    args: argparse.Namespace,
    begin: float,
    explorer: Explorer,
    candidates: Sequence[Candidate],
) -> None:
    """Explores until the time is over, and prints the summary."""
    path = args.out.with_suffix(".jsonl")
    found = ordered(candidates, args.registers)[: args.count]
    print(f"{explorer.device.name}, {explorer.unit}: {len(found)} kernels", flush=True)
    campaign = Campaign(explorer, path, math.inf if args.small else NEAR)
    tried = campaign.run(found, begin + 60 * args.minutes)
    spent = ", ".join(f"{what} {s:.1f} s" for what, s in campaign.seconds.items())
    print("\n".join([*best_ways(path), f"{tried} of {len(found)} kernels tried: {spent}"]))
