"""Which tests reach which mutants, told by one run of a tier in a copy that reports it.

Where a Python mutant would be, the copy notes the test that passes; of shaders, which are compiled.
Children inherit the test's name from pytest's environment, so what they reach counts, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from campaigns.shader_mutants import Mutant

_SHADERS = "qlora_wgpu/gpu/device.py", "pipeline", "shader.path"
"""The module, the method that all kernels pass, and what names a shader there."""
_NOTING = """
import os

_FILE, _seen = {file!r}, set()


def note(what):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (test, what) not in _seen:
        _seen.add((test, what))
        try:
            with open(_FILE, "a") as file:
                file.write(f"{{what}}\\t{{test}}\\n")
        except OSError:  # in a sandbox
            pass
"""


def _call(what: str) -> ast.stmt:
    """A statement that notes the value of an expression."""
    return ast.parse(f'__import__("qlora_wgpu._reached")._reached.note({what})').body[0]


def _blocks(node: ast.AST) -> Iterable[list[ast.stmt]]:
    """The lists of statements right within a statement."""
    for name in ("body", "orelse", "finalbody"):
        yield from filter(None, [getattr(node, name, None)])
    for inner in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield inner.body


def _functions(tree: ast.AST) -> list[Any]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _beginning(function: Any) -> int:
    """The index of the first statement after a docstring."""
    return int(ast.get_docstring(function, clean=False) is not None)


def _block_of(tree: ast.AST, line: int) -> tuple[list[ast.stmt], int] | None:
    """The innermost statement of a function that has a line: its block and its index there."""
    around = [f for f in _functions(tree) if f.body[0].lineno <= line <= f.end_lineno]
    if not around:
        return None
    block: list[ast.stmt] = max(around, key=lambda function: function.lineno).body
    while True:
        index = next(i for i, s in enumerate(block) if line <= (s.end_lineno or 0))
        inner = (
            own for own in _blocks(block[index])
            if own[0].lineno <= line <= (own[-1].end_lineno or 0)
        )  # fmt: skip
        found = next(inner, None) if not isinstance(block[index], ast.ClassDef) else None
        if found is None:
            return block, index
        block = found


def reporting(text: str, lines: Iterable[int], path: str) -> str:
    """A module that notes ``PATH:LINE`` where a test passes these lines (from 1).

    What is computed on import, such as a default or a class's constant, counts as passed wherever
    a function of the module is.
    """
    tree = ast.parse(text)
    for line in lines:
        places = [_block_of(tree, line)]
        if places[0] is None:
            places = [(each.body, _beginning(each)) for each in _functions(tree)]
        for block, index in filter(None, places):
            block.insert(index, _call(repr(f"{path}:{line}")))
    if path == _SHADERS[0]:
        (method,) = [each for each in _functions(tree) if each.name == _SHADERS[1]]
        method.body.insert(0, _call(_SHADERS[2]))
    return ast.unparse(ast.fix_missing_locations(tree))


def report_from(root: Path, mutants: Iterable[Mutant], file: Path) -> None:
    """Has the package of a checkout note in a file what tests reach."""
    lines = defaultdict(set, {_SHADERS[0]: set()})
    for mutant in mutants:
        if mutant.path.endswith(".py"):
            assert mutant.line is not None
            lines[mutant.path].add(mutant.line + 1)
    for path, own in lines.items():
        text = (root / path).read_text(encoding="utf-8")
        (root / path).write_text(reporting(text, own, path), encoding="utf-8")
    (root / "qlora_wgpu" / "_reached.py").write_text(
        _NOTING.format(file=str(file)), encoding="utf-8"
    )


@cache
def _shaders_with(top: Path, path: str) -> frozenset[str]:
    """The shaders that a file of shaders is part of, by ``//#include``."""
    texts = {p.relative_to(top).as_posix(): p.read_text("utf-8") for p in top.rglob("*.wgsl")}
    including = {name: set(re.findall(r"//#include (\S+)", text)) for name, text in texts.items()}
    found, waiting = {path}, [path]
    while waiting:
        one = waiting.pop()
        more = {name for name, others in including.items() if one in others} - found
        found |= more
        waiting += more
    return frozenset(found)


@dataclass(frozen=True)
class Reach:
    """What the tests of a tier reach, and what each costs in seconds, the cheapest first."""

    costs: Mapping[str, float]
    reached: Mapping[str, frozenset[str]]  # the tests, by line or shader
    mutants: tuple[str, ...] = ()  # those that were drawn, as text

    @classmethod
    def read(cls, notes: Path, times: Path, mutants: Iterable[Mutant] = ()) -> Reach:
        """Of a run that has ended; tests that failed in it are left out."""
        costs: dict[str, float] = defaultdict(float)
        failed = set()
        for line in times.read_text(encoding="utf-8").splitlines():
            phase = json.loads(line)
            costs[phase["test"]] += sum(phase["seconds"][1:3])
            if phase["outcome"] == "failed":
                failed.add(phase["test"])
        reached = defaultdict(set)
        for line in notes.read_text(encoding="utf-8").splitlines():
            what, _, test = line.partition("\t")
            reached[what].add(test)
        passed = {t: c for t, c in sorted(costs.items(), key=lambda i: i[1]) if t not in failed}
        found = {what: frozenset(tests) for what, tests in reached.items()}
        return cls(passed, found, tuple(map(str, mutants)))

    def tests(self, mutant: Mutant, root: Path) -> list[str]:
        """The tests that reach a mutant, the cheapest first; all if that is not known."""
        if mutant.path.endswith(".py"):
            found = self.reached.get(f"{mutant.path}:{(mutant.line or 0) + 1}", frozenset())
        else:
            top, path = root / "shaders", mutant.path.removeprefix("shaders/")
            sets = (self.reached.get(name, frozenset()) for name in _shaders_with(top, path))
            found = frozenset().union(*sets)
        return [test for test in self.costs if test in found or not found]

    def save(self, path: Path) -> None:
        """Writes JSON that ``load`` reads."""
        numbers = {test: number for number, test in enumerate(self.costs)}
        reached = {
            what: sorted(numbers[test] for test in tests if test in numbers)
            for what, tests in self.reached.items()
        }
        values = {"costs": self.costs, "reached": reached, "mutants": self.mutants}
        path.write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Reach:
        """What ``save`` has written."""
        values = json.loads(path.read_text(encoding="utf-8"))
        tests = list(values["costs"])
        reached = {w: frozenset(tests[n] for n in own) for w, own in values["reached"].items()}
        return cls(values["costs"], reached, tuple(values["mutants"]))
