"""What explorers measure, in which order, and how they continue."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bench.parts import BENCHMARKS

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import MatrixShape


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import exploring

    monkeypatch.setattr(exploring, "_clock", lambda _: lambda dispatches: list(dispatches))
    return exploring


@dataclass(frozen=True)
class Way:
    seconds: float = 1.0
    wrong: int = 0


class Problem:
    """One whose dispatches are their own times."""

    flops = 1e12

    def dispatch(self, way: Way, pipeline: Any, *, verifies: bool) -> Any:
        return (way.seconds,) if verifies else way.seconds

    def errors(self, way: Way) -> dict[str, int]:
        return {"wrong": way.wrong}


@pytest.fixture
def explore(own: ModuleType, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    def explored(*ways: Way, end: float = math.inf, near: float = 1.5) -> tuple[int, list[str]]:
        """How many were tried, and what was compiled."""
        compiled: list[str] = []

        def started(candidate: Any) -> Callable[[], Any]:
            compiled.append(candidate.name)
            return lambda: "no memory" if candidate.way.seconds == 0 else object()

        explorer = SimpleNamespace(
            started=started, device=SimpleNamespace(dispatch=lambda seconds: None)
        )
        candidates = [
            own.Candidate(
                f"w {way}", "kind", way, str, [[("a", Problem), ("b", Problem)], [("c", Problem)]]
            )
            for way in ways
        ]
        tried = own.Campaign(explorer, tmp_path / "o.jsonl", near).run(candidates, end)
        return tried, compiled

    return explored


def measured(tmp_path: Path) -> list[str]:
    """Sizes and times, in their order."""
    from gpu_rows import read_rows

    rows = read_rows(tmp_path / "o.jsonl")
    return [f"{row['shape']} {row['way']['seconds']}" for row in rows]


def test_slow_ways_are_timed_at_a_groups_first_size_only(
    explore: Callable[..., Any], tmp_path: Path
) -> None:
    assert explore(Way(1.0), Way(1.6), Way(1.4), Way(0.5), Way(0.8))[0] == 5
    assert measured(tmp_path) == [
        *("a 1.0", "b 1.0", "c 1.0"), *("a 1.6", "c 1.6"), *("a 1.4", "b 1.4", "c 1.4"),
        *("a 0.5", "b 0.5", "c 0.5"), *("a 0.8", "c 0.8"),
    ]  # fmt: skip


def test_an_interrupted_campaign_continues(explore: Callable[..., Any], tmp_path: Path) -> None:
    ways = Way(1.0), Way(2.0), Way(0.0), Way(1.2, wrong=3)
    assert explore(*ways, end=time.monotonic() - 1)[0] == 0
    assert explore(*ways[:2])[0] == 2
    tried, compiled = explore(*ways, Way(1.1))
    assert tried == 5 and not {f"w {way}" for way in ways[:2]} & set(compiled)
    before = measured(tmp_path)
    assert explore(*ways, Way(1.1)) == (5, []) and measured(tmp_path) == before
    path = tmp_path / "o.jsonl"  # what was cut off within a line is measured again
    path.write_text(path.read_text()[:-10])
    assert explore(*ways, Way(1.1))[0] == 5 and measured(tmp_path) == before


def test_wrong_and_failed_ways_are_told_and_never_the_best(
    own: ModuleType, explore: Callable[..., Any], tmp_path: Path
) -> None:
    explore(Way(1.0), Way(0.1, wrong=2), Way(0.0), Way(1.4))
    assert measured(tmp_path)[3:] == ["a 0.1", "c 0.1", "a 0.0", "c 0.0", "a 1.4", "b 1.4", "c 1.4"]
    lines = [line.split() for line in own.best_ways(tmp_path / "o.jsonl")]
    assert lines[:3] == [
        ["a", "kind:", "3", "ways,", "1", "wrong"],
        ["1.000", "TFLOP/s", "{'seconds':", "1.0,", "'wrong':", "0}"],
        ["0.714", "TFLOP/s", "{'seconds':", "1.4}"],
    ]
    assert lines[-1] == ["failed,", "2", "times:", "no", "memory"]


def test_what_a_compiler_finds_slow_comes_last(own: ModuleType, tmp_path: Path) -> None:
    names = ["spills", "small", "unknown", "failed", "good"]
    rows = [{"spilled": 8}, {"spilled": 0, "resident_threads": 128}, None, {"failure": "no"},
            {"spilled": 0, "resident_threads": 512}]  # fmt: skip
    kernels = {name: row for name, row in zip(names, rows, strict=True) if row}
    path = tmp_path / "registers.json"
    path.write_text(json.dumps({"kernels": kernels}))
    found = [own.Candidate(name, "", Way(), str, ()) for name in ["today", *names]]
    in_order = [candidate.name for candidate in own.ordered(found, path)]
    assert in_order == ["today", "unknown", "failed", "good", "small", "spills"]
    assert own.ordered(found, None) == found


def test_a_kernel_that_does_not_compile_says_why(own: ModuleType, device: Device) -> None:
    bench = own.Bench(device)
    bench.unit = MatrixShape(16, 16, 16, 32)
    right = "@compute @workgroup_size(1) fn main() {}"
    whys = [
        own.Explorer.started(bench, own.Candidate("", "", Way(), lambda code=code: code, ()))()
        for code in (right, right.replace("main", "other"), "nonsense")
    ]
    assert [isinstance(why, str) and bool(why) for why in whys] == [False, True, True]
