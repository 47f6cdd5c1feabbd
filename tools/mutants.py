"""Changes one operator at a time and looks which tests notice.

usage: python -m tools.mutants --count 60 --seed 1

Half of the mutants are in shaders, half in Python, spread evenly over their folders. The tier
``test`` runs once on a copy that reports which of its tests reach which mutant; each mutant then
meets those, the cheapest first, until one fails: first those in quick, then the others. With the
tier full, what survives meets all cases of the same tests, and those that only full has beside
them. A test that fails without the mutant, too, is named and left out. With --results and --reach,
a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import cache_from_source
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import psutil

from campaigns.python_mutants import of_a_module
from campaigns.shader_mutants import UNREACHED, Mutant, of_a_file
from qlora_wgpu.gpu.adapters import widen_software_vectors
from tools.reach import Reach, report_from

ROOT = Path(__file__).parents[1]
KINDS = ("shader", "python")
TIERS = ("quick", "test", "full")
MOST_DRAWS = 1000
"""How often a mutant that has not been drawn is sought in a folder."""
BATCHES = (30, 300)  # tests, the cheapest first; the last batch has all others

# ---- Which mutants


def rooms(kind: str) -> list[str]:
    """The folders that mutants are spread over; qlora_wgpu stands for its own modules alone."""
    if kind == "python":
        inner = sorted(path.parent.name for path in (ROOT / "qlora_wgpu").glob("*/__init__.py"))
        return ["qlora_wgpu", *(f"qlora_wgpu/{name}" for name in inner)]
    top = ROOT / "shaders"
    files = {path.relative_to(top).as_posix() for path in top.rglob("*.wgsl")}
    return sorted({f"shaders/{f.split('/')[0]}" for f in files if not f.startswith(UNREACHED)})


def room_of(mutant: Mutant) -> str:
    """The folder among `rooms` that a mutant is in."""
    return "/".join(mutant.path.split("/")[: 2 if mutant.path.count("/") > 1 else 1])


def _draw(room: str, rng: random.Random) -> Mutant:
    folder = ROOT / room
    if room.startswith("shaders/"):
        found = of_a_file(rng, (f"{folder.name}/",))
        return replace(found, path=f"shaders/{found.path}")
    return of_a_module(rng, ROOT, folder.glob("*.py" if room == "qlora_wgpu" else "**/*.py"))


def kind_of(number: int) -> str:
    """The kind of a mutant, by its number from 1."""
    return KINDS[(number - 1) % len(KINDS)]


def drawn(count: int, seed: int) -> list[Mutant]:
    """Shaders and Python in turn, the rooms of each in a drawn order, round and round.

    They follow from the seed and the sources. More of a seed begin with the same ones.
    """
    chosen: list[Mutant] = []
    rngs = {kind: random.Random(f"{seed} {kind}") for kind in KINDS}
    orders = {kind: rng.sample(rooms(kind), len(rooms(kind))) for kind, rng in rngs.items()}
    for number in range(1, count + 1):
        kind = kind_of(number)
        room = orders[kind][(number - 1) // len(KINDS) % len(orders[kind])]
        found = (_draw(room, rngs[kind]) for _ in range(MOST_DRAWS))
        mutant = next((mutant for mutant in found if mutant not in chosen), None)
        if mutant is None:
            sys.exit(f"{room} has no more mutants for --count {count}: lower it")
        chosen.append(mutant)
    return chosen


# ---- Running tests on a mutant


@dataclass(frozen=True)
class Outcome:
    """What a tier's tests say of a mutant.

    Attributes:
        mutant: As text: where and what.
        tier: Of the tests.
        caught_by: The test that failed; empty if none did.
        how: failed, hung or died.
        tests: How many might run.
        seconds: Of the wall.
    """

    mutant: str
    tier: str
    caught_by: str
    how: str
    tests: int
    seconds: float


_FAILED = re.compile(  # as a worker of xdist says it, as pytest does, and what is not collected
    r"^(?:\[gw\d+\] (?:FAILED|ERROR) (\S+\.py::.+?)|(\S+\.py::.+) (?:FAILED|ERROR)"
    r"|ERROR (\S+\.py)\b.*)\s*$", re.MULTILINE,
)  # fmt: skip
_TIMEOUT = r"\++ Timeout \++|Timeout \(.*"  # as pytest-timeout says it, and as faulthandler does
_DEATH = r"Fatal Python error: .*"
_BEGUN = re.compile(
    rf"^(?:\[gw\d+\] \w+ )?(\S+\.py::.+?)(?: [A-Z]+| (?:{_TIMEOUT}|{_DEATH}))?\s*$", re.MULTILINE
)


def failed_test(said: str) -> tuple[str, str]:
    """The test that pytest's words blame, and how: the first that failed, else the last begun.

    Empty where there is none, as where pytest itself did not start.
    """
    if found := _FAILED.search(said):
        return next(filter(None, found.groups())), "failed"
    return ["", *_BEGUN.findall(said)][-1], "hung" if re.search(_TIMEOUT, said) else "died"


class Copy:
    """A copy of the checkout, in which tests run with or without a mutant."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.root, self.seconds = folder / "checkout", seconds
        folder.mkdir(parents=True)
        skipped = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=skipped)
        if (ROOT.parent / "shared").is_dir():  # recorded data that a checkout may have beside it
            (folder / "shared").symlink_to(ROOT.parent / "shared")
        code, said = self._run("-c", "import qlora_wgpu as q; print(q.__file__)")
        if code or not said.startswith(str(self.root)):
            sys.exit(f"children in {self.root} import another package: {said}")

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """While it is entered, the copy has the mutant."""
        path = self.root / mutant.path
        right = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutant.source(mutant.path, right))
            yield
        finally:
            self._write(path, right)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python would keep what it compiled of a text of the same length and second.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def _run(self, *arguments: str, seconds: float = 60) -> tuple[int | None, str]:
        """Runs Python here; its exit code, None if it took too long, and what it wrote."""
        with tempfile.TemporaryDirectory(dir=self.root.parent, ignore_cleanup_errors=True) as own:
            # Compiled shaders are shared, whoever asks for them; caches of wrong results are not.
            environment = dict(os.environ)
            widen_software_vectors(environment)  # wider ones have a cache of their own
            caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
            environment.setdefault("MESA_SHADER_CACHE_DIR", caches)
            environment |= {"PYTHONPATH": str(self.root), "XDG_CACHE_HOME": own, "TMPDIR": own}
            environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
            with (Path(own) / "output").open("w+b") as output:
                process = subprocess.Popen(
                    [sys.executable, *arguments], cwd=self.root, env=environment,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
                code = None
                try:
                    code = process.wait(seconds)
                except subprocess.TimeoutExpired:
                    pass
                finally:  # with what it started and left behind
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                output.seek(0)
                return code, output.read().decode(errors="replace")

    def failing(self, given: Sequence[str], patience: int = 1) -> tuple[str, str]:
        """The first of some tests that fails, and how; both empty if all pass."""
        most = patience * self.seconds
        listed = self.root.parent / "tests.txt"
        listed.write_text("".join(f"{test}\n" for test in given), encoding="utf-8")
        code, said = self._run(
            "-m", "pytest", f"@{listed}", "--tier", "full", "-x", "-vv", "-rE", "--tb=no",
            "-o", "console_output_style=classic", "-p", "no:cacheprovider",
            f"--timeout={most}", "--timeout-method=thread",
            seconds=2 * most + 20 * len(given),  # for one test that hangs, and the others
        )  # fmt: skip
        if code in (0, 5):
            return "", ""
        test, how = failed_test(said)
        return test or given[0], "hung" if code is None else how

    def collected(self, tier: str, *paths: str) -> list[str]:
        """The tests of a tier in files, or in all that `make` gives to pytest."""
        paths = paths or (("tests", "campaigns") if tier == "full" else ("tests",))
        given = ("--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
        _, said = self._run("-m", "pytest", *paths, "--tier", tier, *given, seconds=300)
        return [each for each in said.splitlines() if "::" in each]

    def reach(self, mutants: Sequence[Mutant], workers: int) -> Reach:
        """Runs the tier test here, once, and leaves sources that report what tests reach."""
        notes, times = self.root.parent / "reached.txt", self.root.parent / "times.jsonl"
        notes.touch()
        report_from(self.root, mutants, notes)
        self._run(
            "-m", "pytest", "tests", "--tier", "test", "-n", str(workers), "--dist", "worksteal",
            "--times", str(times), "-p", "no:cacheprovider", f"--timeout={self.seconds}",
            seconds=4 * 3600,
        )  # fmt: skip
        return Reach.read(notes, times, mutants)


class Judge:
    """Finds the test that notices a mutant.

    Attributes:
        red: Tests that fail without a mutant.
    """

    def __init__(self, copy: Copy, reach: Reach) -> None:
        self._copy, self._reach = copy, reach
        self._quick = frozenset(copy.collected("quick"))
        self._green: set[str] = set()
        self.red: set[str] = set()

    def tests(self, mutant: Mutant, tier: str) -> list[str]:
        """The tests of a tier, and of none before it, that reach a mutant."""
        reaching = self._reach.tests(mutant, self._copy.root)
        if tier != "full":
            return [test for test in reaching if (test in self._quick) == (tier == "quick")]
        functions, ran = {_function(test) for test in reaching}, set(reaching)
        files = sorted({test.split("::")[0] for test in reaching})
        known = {_function(test) for test in self._reach.costs}
        return [
            test for test in self._copy.collected("full", *files)
            if test not in ran and (_function(test) in functions or _function(test) not in known)
        ]  # fmt: skip

    def outcome(self, mutant: Mutant, tier: str) -> Outcome:
        """Runs the tests until one fails that passes otherwise; soon, as most are noticed soon."""
        began, tests = time.monotonic(), self.tests(mutant, tier)
        ends = [0, *(end for end in BATCHES if end < len(tests)), len(tests)]
        test = how = ""
        for begin, end in pairwise(ends):
            test, how = self._first_failing(mutant, tests[begin:end])
            if test:
                break
        return Outcome(str(mutant), tier, test, how, len(tests), round(time.monotonic() - began, 1))

    def _first_failing(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str]:
        while given := [test for test in tests if test not in self.red]:
            with self._copy.mutated(mutant):
                test, how = self._copy.failing(given)
            if not test or test in self._green:
                return test, how
            # What is slow on a busy machine is no failure; what hangs with a mutant must not be as
            # slow without it. A file that cannot be imported fails all its tests.
            alone = [test] if "::" in test else [each for each in given if each.startswith(test)]
            failing, without = self._copy.failing(alone, patience=1 if how == "hung" else 4)
            if not failing:
                self._green.add(test)
                return test, how
            self.red.update(alone if failing == test else [failing])
            print(f"{without} without a mutant, left out: {failing}", flush=True)
        return "", ""


def _function(test: str) -> str:
    """A test without the values of its arguments."""
    return test.split("[")[0]


class Results:
    """Outcomes, kept in a file of JSON lines if there is one: what it has is not run again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._had: dict[tuple[str, str], Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                outcome = Outcome(**json.loads(line))
                self._had[outcome.mutant, outcome.tier] = outcome

    def of(self, mutant: Mutant, tier: str, judge: Judge) -> Outcome:
        """What was found before, or else is found now."""
        if had := self._had.get((str(mutant), tier)):
            return had
        outcome = judge.outcome(mutant, tier)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        return outcome


# ---- The report


def line(number: int, mutant: Mutant, outcome: Outcome) -> str:
    """A row of the table."""
    if outcome.caught_by:
        said = f"{outcome.tier}, {outcome.seconds:.0f} s: {outcome.how} {outcome.caught_by}"
    else:
        said = f"NOT CAUGHT by {outcome.tests} tests of {outcome.tier}, {outcome.seconds:.0f} s"
    return f"{number:3} {room_of(mutant)} | {mutant} | {said}"


def summary(
    chosen: dict[int, Mutant], last: dict[int, Outcome], tiers: Sequence[str]
) -> Iterator[str]:
    """What each tier lets through, by kind, and in one line how many it and those before caught."""
    counts = []
    for index, tier in enumerate(tiers):
        caught = {n for n, o in last.items() if o.caught_by and o.tier in tiers[: index + 1]}
        for kind in KINDS:
            own = {n for n in last if kind_of(n) == kind}
            if own:
                yield f"{tier}, {kind}: {len(own & caught)} of {len(own)} caught"
        counts.append(f"{len(caught)} of {len(last)} caught by {tier}")
    survivors = {n: o for n, o in last.items() if not o.caught_by}
    for number, outcome in survivors.items():
        yield f"survives {outcome.tests} tests of {outcome.tier}: {number} {chosen[number]}"
    yield ", ".join(counts)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=60, help="mutants to draw")
    add("--seed", type=int, default=1)
    add("--only", type=int, nargs="+", metavar="N", help="these numbers of them")
    add("--kinds", choices=KINDS, nargs="+", default=KINDS)
    add("--tiers", choices=TIERS, nargs="+", default=["quick", "test"])
    add("--reach", type=Path, metavar="FILE", help="write there what tests reach, or read it")
    add("--results", type=Path, metavar="FILE", help="add outcomes to this, and go on from it")
    add("--workers", type=int, default=2, help="mutants at once")
    add("--timeout", type=int, default=600, help="seconds after which a test hangs")
    add("--list", action="store_true", help="show the mutants and run nothing")
    return parser.parse_args()


def main() -> None:
    """Draws mutants, has tests run on them and reports."""
    args = arguments()
    chosen = {
        number: mutant
        for number, mutant in enumerate(drawn(args.count, args.seed), 1)
        if kind_of(number) in args.kinds and (not args.only or number in args.only)
    }
    if args.list:
        for number, mutant in chosen.items():
            print(f"{number:3} {room_of(mutant)} | {mutant}")
        return
    tiers = [tier for tier in TIERS if tier in args.tiers]
    if hasattr(psutil, "RLIMIT_DATA"):  # a mutant may ask for all memory that there is
        own, most = psutil.Process(), psutil.virtual_memory().total // 2
        own.rlimit(psutil.RLIMIT_DATA, (most, own.rlimit(psutil.RLIMIT_DATA)[1]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started ends
    last: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        if args.reach and args.reach.exists():
            reach = Reach.load(args.reach)
            if reach.mutants != tuple(map(str, drawn(args.count, args.seed))):
                sys.exit(f"{args.reach} is of other mutants or sources: remove it")
        else:
            copy = Copy(Path(folder) / "reach", args.timeout)
            reach = copy.reach(drawn(args.count, args.seed), args.workers)
            if args.reach:
                reach.save(args.reach)
        names = [str(number) for number in range(args.workers)]
        judges = SimpleQueue[Judge]()
        made = [Judge(Copy(Path(folder) / name, args.timeout), reach) for name in names]
        for judge in made:
            judges.put(judge)
        results = Results(args.results)

        def judged(number: int) -> None:
            own = judges.get()
            for tier in tiers:
                last[number] = results.of(chosen[number], tier, own)
                print(line(number, chosen[number], last[number]), flush=True)
                if last[number].caught_by:
                    break
            judges.put(own)

        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(judged, chosen))
    red = sorted(set().union(*(judge.red for judge in made)))
    print("\n".join(["", *(f"fails without a mutant: {test}" for test in red),
                     *summary(chosen, dict(sorted(last.items())), tiers)]))  # fmt: skip


if __name__ == "__main__":
    main()
