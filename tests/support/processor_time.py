"""A pytest plugin that measures what each test costs a processor, and holds the sum to a budget.

Processor seconds are those of the process with all its threads (a software GPU's are among them)
and of the processes that a test started and waited for. A budget counts them as a quiet core would
have them: a yardstick that is timed meanwhile tells how much slower this one is.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections import defaultdict
from functools import wraps
from pathlib import Path

import pytest

YARDSTICK = 0.0023
"""Seconds that the yardstick takes on a quiet core of the machine that budgets were set on."""
BETWEEN = 2.0
"""Processor seconds after which it is laid on again."""
LONGEST = 30.0
"""Processor seconds that a test of a budgeted run may need: 20, and half as many for chance."""


def yardstick() -> float:
    """Processor seconds of a fixed piece of work."""
    begin = time.process_time()
    total = 0
    for number in range(40_000):
        total += number * number % 7
    return time.process_time() - begin


class Clock:
    """Seconds of the wall, of this process and of its children, between one look and the next."""

    def __init__(self) -> None:
        self._last = self._now()
        self._measured = -BETWEEN
        self._slowness = 1.0

    @property
    def slowness(self) -> float:
        """How much longer than on a quiet core work takes now; never less than 1."""
        if time.process_time() - self._measured > BETWEEN:
            self._slowness = max(1.0, min(yardstick() for _ in range(2)) / YARDSTICK)
            self._measured = time.process_time()
        return self._slowness

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = os.times()
        children = times.children_user + times.children_system
        return time.perf_counter(), time.process_time(), children

    def lap(self) -> list[float]:
        """Seconds since the last: of the wall, own, of children, and of a quiet core."""
        last, self._last = self._last, self._now()
        wall, own, children = (now - then for now, then in zip(self._last, last, strict=True))
        return [wall, own, children, (own + children) / self.slowness]


class ProcessorTime:
    """Notes what each phase of each test costs; xdist's workers hand it on with their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.clock = Clock()
        self.tests: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        self.collecting = [0.0] * 4
        self.causes = _Causes() if config.getoption("times") else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collecting = self.clock.lap()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        for index, seconds in enumerate(getattr(node, "workeroutput", {}).get("collecting", ())):
            self.collecting[index] += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.seconds = self.clock.lap()
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

    def excess(self) -> list[str]:
        """What exceeds the budget, in sentences."""
        budget = self.config.getoption("budget")
        if not budget:
            return []
        total = sum(seconds[3] for seconds in [*self.tests.values(), self.collecting])
        found = [
            f"{test} needs {seconds[3]:.0f} s of a processor, and a test may have {LONGEST:.0f}"
            for test, seconds in self.tests.items()
            if seconds[3] > LONGEST
        ]
        if total > budget:
            found.append(
                f"the tests need {total:.0f} s of a quiet core, and the budget is {budget:.0f}: "
                "make them cheaper, or mark what is expensive as full (tests/support/tiers.py)"
            )
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            self.config.workeroutput["collecting"] = self.collecting
        elif session.exitstatus == pytest.ExitCode.OK and self.excess():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        folders: dict[str, float] = defaultdict(float)
        for test, (_, own, children, _) in self.tests.items():
            folders["/".join(test.split("::")[0].split("/")[1:-1])] += own + children
        folders["collecting"] = self.collecting[1] + self.collecting[2]
        total, quiet = (
            sum(count(seconds) for seconds in [*self.tests.values(), self.collecting])
            for count in (lambda s: s[1] + s[2], lambda s: s[3])
        )
        terminalreporter.write_line(
            f"processor time {total:.0f} s ({quiet:.0f} s of a quiet core): "
            + ", ".join(
                f"{name} {seconds:.0f}"
                for name, seconds in sorted(folders.items(), key=lambda pair: -pair[1])
                if seconds >= 0.5
            )
        )
        for sentence in self.excess():
            terminalreporter.write_line(sentence, red=True)


class _Causes:
    """Processor and wall seconds by what the product does, counted once where they are nested."""

    PLACES = (
        ("compile", "qlora_wgpu.gpu.device", "Device", "_compile"),
        ("run", "qlora_wgpu.graph.program", "Program", "run"),
        ("run", "qlora_wgpu.gpu.device", "Transfers", "read"),
        ("bind", "qlora_wgpu.graph.program", "Program", "__init__"),
        ("open device", "qlora_wgpu.gpu.device", "Device", "__init__"),
        ("plan", "qlora_wgpu.graph.plan", None, "compile_plan"),
    )

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._inner = [[0.0, 0.0]]
        for cause, module, owner, name in self.PLACES:
            place = importlib.import_module(module)
            if owner:
                place = getattr(place, owner)
            setattr(place, name, self._timed(cause, getattr(place, name)))

    def _timed(self, cause, function):
        @wraps(function)
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

        return timed

    def lap(self) -> dict[str, list[float]]:
        last, self.sums = dict(self.sums), defaultdict(lambda: [0, 0.0, 0.0])
        return last


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", metavar="FILE", help="add what each phase costs to a file of JSON lines"
    )

    parser.addoption("--budget", type=float, help="processor seconds that the tests may need")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(config), "processor_time")
