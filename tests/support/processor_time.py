"""A pytest plugin that measures what each test costs a processor, and holds the sum to a budget.

Processor seconds are those of the process with all its threads (a software GPU's are among them)
and of the processes that a test started and waited for.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest


class Clock:
    """Seconds of the wall, of this process and of its children, between one look and the next."""

    def __init__(self) -> None:
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.Process().cpu_times()
        children = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return time.perf_counter(), time.process_time(), children

    def lap(self) -> tuple[float, float, float]:
        last, self._last = self._last, self._now()
        return tuple(now - then for now, then in zip(self._last, last, strict=True))


class ProcessorTime:
    """Notes what each phase of each test costs; xdist's workers hand it on with their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.clock = Clock()
        self.tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.collecting = [0.0, 0.0, 0.0]
        self.causes = _Causes() if config.getoption("times") else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collecting = list(self.clock.lap())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        for index, seconds in enumerate(getattr(node, "workeroutput", {}).get("collecting", ())):
            self.collecting[index] += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["collecting"] = self.collecting

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.seconds = list(self.clock.lap())
        report.causes = self.causes.lap() if self.causes else {}
        return report

    def pytest_runtest_logreport(self, report) -> None:
        if self.is_worker:
            return
        if hasattr(report, "seconds"):
            totals = self.tests[report.nodeid]
            for index, seconds in enumerate(report.seconds):
                totals[index] += seconds
        if path := self.config.getoption("times"):
            line = {
                "test": report.nodeid, "phase": report.when, "outcome": report.outcome,
                "seconds": getattr(report, "seconds", []), "causes": getattr(report, "causes", {}),
            }  # fmt: skip
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")

    @property
    def is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    @property
    def processor_seconds(self) -> float:
        return sum(own + children for _, own, children in [*self.tests.values(), self.collecting])

    def pytest_terminal_summary(self, terminalreporter) -> None:
        folders: dict[str, float] = defaultdict(float)
        for test, (_, own, children) in self.tests.items():
            folders["/".join(test.split("::")[0].split("/")[1:-1])] += own + children
        folders["collecting"] = self.collecting[1] + self.collecting[2]
        terminalreporter.write_line(
            f"processor time {self.processor_seconds:.0f} s: "
            + ", ".join(
                f"{name} {seconds:.0f}"
                for name, seconds in sorted(folders.items(), key=lambda pair: -pair[1])
                if seconds >= 0.5
            )
        )


class _Causes:
    """Processor and wall seconds by what the product does, counted once where they are nested."""

    PLACES = (
        ("compile", "qlora_wgpu.gpu.device", "Device", "_compile"),
        ("run", "qlora_wgpu.graph.program", "Program", "run"),
        ("run", "qlora_wgpu.gpu.transfers", "Transfers", "read"),
        ("bind", "qlora_wgpu.graph.program", "Program", "__init__"),
        ("open device", "qlora_wgpu.gpu.device", "Device", "__init__"),
        ("plan", "qlora_wgpu.graph.plan", None, "make_plan"),
        ("shader text", "qlora_wgpu.gpu.wgsl", None, "load_shader"),
    )

    def __init__(self) -> None:
        import importlib

        self.sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._inner = [[0.0, 0.0]]
        for cause, module, owner, name in self.PLACES:
            place = importlib.import_module(module)
            if owner:
                place = getattr(place, owner)
            setattr(place, name, self._timed(cause, getattr(place, name)))

    def _timed(self, cause, function):
        def timed(*given, **named):
            wall, own = time.perf_counter(), time.process_time()
            self._inner.append([0.0, 0.0])
            try:
                return function(*given, **named)
            finally:
                wall, own = time.perf_counter() - wall, time.process_time() - own
                inner = self._inner.pop()
                outer = self._inner[-1]
                outer[0], outer[1] = outer[0] + wall, outer[1] + own
                sums = self.sums[cause]
                sums[0] += 1
                sums[1] += wall - inner[0]
                sums[2] += own - inner[1]

        for name in ("cache_clear", "cache_info"):
            if hasattr(function, name):
                setattr(timed, name, getattr(function, name))
        return timed

    def lap(self) -> dict[str, list[float]]:
        last, self.sums = dict(self.sums), defaultdict(lambda: [0, 0.0, 0.0])
        return last


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", metavar="FILE", help="add what each phase costs to a file of JSON lines"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(config), "processor_time")
