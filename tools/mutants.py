"""Changes one operator at a time and looks which tests notice.

usage: python -m tools.mutants --count 60 --seed 1

Half of the mutants are in shaders, half in Python, spread evenly over their folders. A tier's tests
run on each in a copy of this checkout, the nearest files first, until one fails. What survives a
tier meets the next. A test that fails without the mutant, too, is named and left out. With
--results, a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
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
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import cache_from_source
from itertools import pairwise
from pathlib import Path

import psutil

from campaigns.python_mutants import of_a_module
from campaigns.shader_mutants import UNREACHED, Mutant, of_a_file

ROOT = Path(__file__).parents[1]
KINDS = ("shader", "python")
TIERS = ("quick", "test", "full")
BATCHES = (3, 10)  # files, nearest first; the last batch has all others

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
        mutant = _draw(room, rngs[kind])
        while mutant in chosen:
            mutant = _draw(room, rngs[kind])
        chosen.append(mutant)
    return chosen


# ---- Which tests are near


class Nearness:
    """Which file uses which: by imports, names of modules and shaders in texts, and includes."""

    _FOLDERS = ("qlora_wgpu", "tests", "campaigns", "tools", "benchmarks", "demo")

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [p.relative_to(root) for name in self._FOLDERS for p in (root / name).rglob("*.py")]
        self._modules: dict[str, str] = {}
        for path in paths:
            parts = path.parts[:-1] if path.name == "__init__.py" else path.with_suffix("").parts
            for names in (parts, parts[1:]):  # as tests and scripts import each other
                self._modules.setdefault(".".join(names), path.as_posix())
        top = root / "shaders"
        self._shaders = [path.relative_to(top).as_posix() for path in top.rglob("*.wgsl")]
        self.uses = {path.as_posix(): set(self._used(path)) for path in paths}
        for shader in self._shaders:
            included = re.findall(r"//#include (\S+)", (top / shader).read_text(encoding="utf-8"))
            self.uses[f"shaders/{shader}"] = {f"shaders/{other}" for other in included}
        self._users = defaultdict(set)
        for path, used in self.uses.items():
            for other in used:
                self._users[other].add(path)

    def _used(self, path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse((self.root / path).read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names):
                    yield from self._found(name.name for name in names)
                case ast.ImportFrom(module=str(module), names=names):
                    yield from self._found([module, *(f"{module}.{name.name}" for name in names)])
                case ast.Attribute(attr="import_module"):  # of what lies in its folder
                    folder = (self.root / path).parent
                    yield from (p.relative_to(self.root).as_posix() for p in folder.glob("*.py"))
                case ast.Constant(str(text)):
                    yield from self._found([text, f"{text}.__main__"])
                    yield from (f"shaders/{name}" for name in self._shaders if name == text)
                case ast.JoinedStr(values):
                    texts = (getattr(value, "value", "") for value in values)
                    parts = (re.escape(t) if isinstance(t, str) else "[^/]*" for t in texts)
                    if (pattern := "".join(parts)).endswith("wgsl"):
                        matching = (name for name in self._shaders if re.fullmatch(pattern, name))
                        yield from (f"shaders/{name}" for name in matching)

    def _found(self, names: Iterable[str]) -> list[str]:
        return [self._modules[name] for name in names if name in self._modules]

    @staticmethod
    def _distances(begin: str, edges: dict[str, set[str]]) -> dict[str, int]:
        distances, waiting = {begin: 0}, deque([begin])
        while waiting:
            path = waiting.popleft()
            for other in edges.get(path, set()) - distances.keys():
                distances[other] = distances[path] + 1
                waiting.append(other)
        return distances

    def nearest(self, path: str, tests: Iterable[str]) -> list[str]:
        """Test files by nearness to a file.

        Those of the same name come first, then those that use it through the fewest others; of
        equals those of its room, and those that use least.
        """
        distances = self._distances(path, self._users)
        room, names = _names(path)

        def key(test: str) -> tuple[object, ...]:
            *_, folder, file = test.split("/")
            name = file.removeprefix("test_").removesuffix(".py")
            alike = any(own.startswith(f"{name}_") or name.startswith(f"{own}_") for own in names)
            mirror = 0 if name in names else 1 if alike and folder == room else 2
            far = distances.get(test, len(self.uses))
            return mirror, far, folder != room, self._reach(test), test

        return sorted(tests, key=key)

    @cache  # noqa: B019
    def _reach(self, test: str) -> int:
        return len(self._distances(test, self.uses))


def _names(path: str) -> tuple[str, set[str]]:
    """The folder of a file's tests, and what may follow ``test_`` in the names of theirs."""
    parts = [part for part in path.rsplit(".", 1)[0].split("/")[1:] if part != "__init__"]
    if path.startswith("shaders/"):
        room, parts = "ops", parts[1:] if parts[0] == "common" else parts
    else:
        room = parts[0] if path.count("/") > 1 else "unit"
    return room, {"_".join(parts[first:]) for first in range(len(parts))}


def test_files(root: Path, tier: str) -> list[str]:
    """What `make` gives to pytest in a tier."""
    folders = ("tests", "campaigns") if tier == "full" else ("tests",)
    found = (path for folder in folders for path in (root / folder).rglob("test_*.py"))
    return sorted(path.relative_to(root).as_posix() for path in found)


# ---- Running tests on a mutant


@dataclass(frozen=True)
class Outcome:
    """What a tier's tests say of a mutant.

    Attributes:
        mutant: As text: where and what.
        tier: Of the tests.
        caught_by: The test that failed; empty if none did.
        how: failed, hung or died.
        files: Test files that might run; all of the tier or the nearest.
        seconds: Of the wall.
    """

    mutant: str
    tier: str
    caught_by: str
    how: str
    files: int
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
            caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
            environment = {"MESA_SHADER_CACHE_DIR": caches, **os.environ}
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

    def failing(self, given: Sequence[str], *options: str, patience: int = 1) -> tuple[str, str]:
        """The first test that fails, and how; both empty if all pass."""
        most = patience * self.seconds
        code, said = self._run(
            "-m", "pytest", *given, *options, "-x", "-vv", "-rE", "--tb=no",
            "-o", "console_output_style=classic", "-p", "no:cacheprovider",
            f"--timeout={most}", "--timeout-method=thread",
            seconds=2 * most + 20 * len(given),  # for one test that hangs, and the others
        )  # fmt: skip
        if code in (0, 5):  # 5: none of these is in the tier
            return "", ""
        test, how = failed_test(said)
        return test or given[0], "hung" if code is None else how


class Judge:
    """Finds the test that notices a mutant.

    Attributes:
        red: Tests that fail without a mutant.
    """

    def __init__(self, copy: Copy, nearest: int | None, workers: int) -> None:
        self._copy, self._nearest, self._workers = copy, nearest, workers
        self._nearness = Nearness(copy.root)
        self._green: set[str] = set()
        self.red: set[str] = set()

    def files(self, mutant: Mutant, tier: str) -> list[str]:
        """The test files that may run, the nearest first."""
        return self._nearness.nearest(mutant.path, test_files(self._copy.root, tier))[
            : self._nearest
        ]

    def outcome(self, mutant: Mutant, tier: str) -> Outcome:
        """Runs a tier's tests, the nearest files first, until one fails that passes otherwise."""
        began, files = time.monotonic(), self.files(mutant, tier)
        ends = [0, *(end for end in BATCHES if end < len(files)), len(files)]
        test = how = ""
        for begin, end in pairwise(ends):
            many = ["-n", str(self._workers), "--dist", "worksteal"] if begin == BATCHES[-1] else []
            test, how = self._first_failing(mutant, files[begin:end], "--tier", tier, *many)
            if test:
                break
        return Outcome(str(mutant), tier, test, how, len(files), round(time.monotonic() - began, 1))

    def _first_failing(self, mutant: Mutant, files: list[str], *options: str) -> tuple[str, str]:
        while given := [file for file in files if file not in self.red]:
            left_out = [f"--deselect={red}" for red in sorted(self.red)]
            with self._copy.mutated(mutant):
                test, how = self._copy.failing(given, *options, *left_out)
            if not test or test in self._green:
                return test, how
            # A file is blamed where it cannot be collected. What is slow on a busy machine is no
            # failure; what hangs with a mutant must not be as slow without it.
            alone = ["--tier", "full"] if "::" in test else ["--collect-only"]
            patience = 1 if how == "hung" else 4
            failing, without = self._copy.failing([test], *alone, patience=patience)
            if not failing:
                self._green.add(test)
                return test, how
            self.red.add(test if test not in self.red else test.split("::")[0])
            print(f"{without} without a mutant, left out: {test}", flush=True)
        return "", ""


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
        """What was found before, if as many files would not change it, or else is found now."""
        had = self._had.get((str(mutant), tier))
        if had and (had.caught_by or had.files >= len(judge.files(mutant, tier))):
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
        said = f"NOT CAUGHT by {outcome.files} files of {outcome.tier}, {outcome.seconds:.0f} s"
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
        yield f"survives {outcome.files} files of {outcome.tier}: {number} {chosen[number]}"
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
    add("--nearest", type=int, metavar="N", help="no more than so many test files")
    add("--results", type=Path, metavar="FILE", help="add outcomes to this, and go on from it")
    add("--workers", type=int, default=2, help="processes of pytest in the last batch")
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
        judge = Judge(Copy(Path(folder), args.timeout), args.nearest, args.workers)
        results = Results(args.results)
        for number, mutant in chosen.items():
            for tier in tiers:
                last[number] = results.of(mutant, tier, judge)
                print(line(number, mutant, last[number]), flush=True)
                if last[number].caught_by:
                    break
    print("\n".join(["", *(f"fails without a mutant: {test}" for test in sorted(judge.red)),
                     *summary(chosen, last, tiers)]))  # fmt: skip


if __name__ == "__main__":
    main()
