"""Shows what the tests cost: processor seconds by folder, file, test and cause.

    python tools/test_times.py                       runs the gate's tests, then shows them
    python tools/test_times.py --run --tier full     any tests, as pytest takes them
    python tools/test_times.py --file times.jsonl    shows an earlier run

A cold run, whose shaders are compiled by the driver, has an empty folder as XDG_CACHE_HOME.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
WALL, OWN, CHILDREN = range(3)


def run(arguments: list[str], file: Path) -> None:
    """Runs tests on two workers, each of whose phases adds a line to a file."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]
    subprocess.run([*command, "--times", str(file), *arguments], cwd=ROOT, check=False)


class Costs:
    """What the tests of a run cost, as ``--times`` of pytest writes it down."""

    def __init__(self, file: Path) -> None:
        self.tests: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        self.causes: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)  # calls, wall, own
        for line in file.read_text(encoding="utf-8").splitlines():
            phase = json.loads(line)
            for index, seconds in enumerate(phase["seconds"][:3]):
                self.tests[phase["test"]][index] += seconds
            for cause, values in phase["causes"].items():
                for index, value in enumerate(values):
                    self.causes[cause][index] += value

    def by(self, key) -> list[tuple[str, int, list[float]]]:
        """Groups of tests with their number and sums, the most expensive first."""
        groups: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([0], [0.0] * 3))
        for test, seconds in self.tests.items():
            count, sums = groups[key(test)]
            count[0] += 1
            for index, value in enumerate(seconds):
                sums[index] += value
        rows = [(name, count[0], sums) for name, (count, sums) in groups.items()]
        return sorted(rows, key=lambda row: -row[2][OWN] - row[2][CHILDREN])

    def show_causes(self) -> None:
        """Where a process was in the product, its children's time, and time that is nobody's."""
        own = sum(seconds[OWN] for seconds in self.tests.values())
        named = sum(values[2] for values in self.causes.values())
        print(f"{'cause':<28}{'calls':>10}{'processor s':>13}")
        for cause, (calls, _, seconds) in sorted(self.causes.items(), key=lambda c: -c[1][2]):
            print(f"{cause:<28}{calls:>10.0f}{seconds:>13.0f}")
        waiting = sum(max(0.0, s[WALL] - s[OWN] - s[CHILDREN]) for s in self.tests.values())
        for cause, seconds in (
            ("other Python and NumPy", own - named),
            ("processes started", sum(seconds[CHILDREN] for seconds in self.tests.values())),
            ("(waiting, no processor)", waiting),
        ):
            print(f"{cause:<28}{'':>10}{seconds:>13.0f}")

    def show(self, title: str, key, most: int) -> None:
        """A table of groups of tests."""
        print(f"\n{title:<72}{'tests':>7}{'wall s':>9}{'own s':>8}{'children s':>12}")
        for name, count, (wall, own, children) in self.by(key)[:most]:
            print(f"{name:<72}{count:>7}{wall:>9.1f}{own:>8.1f}{children:>12.1f}")


def main() -> None:
    """Runs tests, or reads what an earlier run wrote, and shows their costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="of an earlier run")
    parser.add_argument("--most", type=int, default=30, help="rows of files and tests")
    parser.add_argument("--run", nargs=argparse.REMAINDER, default=["--tier", "test", "tests"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder, "times.jsonl")
        if options.file is None:
            run(options.run, file)
        costs = Costs(file)
    costs.show_causes()
    costs.show("folder", lambda test: "/".join(test.split("::")[0].split("/")[:-1]), 100)
    costs.show("file", lambda test: test.split("::")[0], options.most)
    costs.show("test", lambda test: test, options.most)


if __name__ == "__main__":
    main()
