"""Shaders with one operator changed: where, into what, and loading them in place of the right ones.

A mutant is made either in a shader's file, so that every variant and every copy of an unrolled line
has it, or in one statement of what the preprocessor makes, one copy of an unrolled line included.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.wgsl import Bindings, Constants, Shader
from qlora_wgpu.graph import launch

Key = tuple[str, Constants, Bindings]  # what load_shader is asked for

_SKIPPED = re.compile(
    r"@group|@compute|^\s*struct|^\s*fn main|^\s*//(?!#unroll)|^\s*var<workgroup>"
)
# Computed by tools only, or on matrix units, which no software GPU has.
UNREACHED = ("probe/", "bench/", "common/tile_matrix.wgsl")
BARRIER = "barrier removed"


def _constant(found: re.Match[str]) -> str:
    return f"{int(found[1]) + 1}u" if found[1] != "16" else "15u"


def _number(found: re.Match[str]) -> str:
    value = float(found[0])
    return repr(value * 1.25) if value else "0.5"


# Kind, where, what instead.
_CHANGES: list[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    ("+ to -", re.compile(r" \+ "), " - "),
    ("- to +", re.compile(r" - "), " + "),
    ("* to /", re.compile(r" \* "), " / "),
    ("/ to *", re.compile(r" / "), " * "),
    ("% to /", re.compile(r" % "), " / "),
    ("+= to -=", re.compile(r" \+= "), " -= "),
    ("*= to /=", re.compile(r" \*= "), " /= "),
    ("dropped accumulate", re.compile(r" [+*]= "), " = "),
    ("< to <=", re.compile(r" < "), " <= "),
    ("< to >", re.compile(r" < "), " > "),
    ("<= to <", re.compile(r" <= "), " < "),
    (">= to >", re.compile(r" >= "), " > "),
    ("> to >=", re.compile(r" > "), " >= "),
    ("> to <", re.compile(r" > "), " < "),
    ("== to !=", re.compile(r" == "), " != "),
    ("!= to ==", re.compile(r" != "), " == "),
    ("&& to ||", re.compile(r" && "), " || "),
    ("|| to &&", re.compile(r" \|\| "), " && "),
    ("<< to >>", re.compile(r" << "), " >> "),
    (">> to <<", re.compile(r" >> "), " << "),
    ("& to |", re.compile(r" & "), " | "),
    ("min to max", re.compile(r"\bmin\("), "max("),
    ("max to min", re.compile(r"\bmax\("), "min("),
    ("identity for a function", re.compile(r"\b(?:exp|sqrt|inverseSqrt|tanh|abs|floor)\("), "("),
    ("negated", re.compile(r"\bf32\("), "-f32("),
    ("negated", re.compile(r"\bnot_above_zero\("), "("),
    ("swapped choice", re.compile(r"\bselect\("), "select_swapped("),
    ("off by one", re.compile(r"(?<![\w.])(\d+)u\b"), _constant),
    ("another constant", re.compile(r"(?<![\w.])\d+\.\d+(?:e-?\d+)?\b"), _number),
    ("another component", re.compile(r"\.x\b"), ".y"),
    ("another component", re.compile(r"\.y\b"), ".x"),
    ("another component", re.compile(r"\.z\b"), ".w"),
    ("another component", re.compile(r"\.w\b"), ".z"),
    ("another half", re.compile(r"\blow\("), "high("),
    ("another half", re.compile(r"\bhigh\("), "low("),
    ("another half", re.compile(r"\.lo\b"), ".hi"),
    ("another half", re.compile(r"\.even\b"), ".odd"),
    ("another half", re.compile(r"\.odd\b"), ".even"),
    (BARRIER, re.compile(r"workgroupBarrier\(\);"), ""),
]
_STEP = re.compile(r"for \([^;]*;[^;]*;([^)]*)\)")


@dataclass(frozen=True)
class Mutant:
    """One operator changed.

    Attributes:
        kind: How.
        path: The file, or of a statement the shader that it is in.
        before: The file's line or the statement.
        after: What stands there instead.
        line: Its index in the file; None where it is a statement of the preprocessed shader.
    """

    kind: str
    path: str
    before: str
    after: str
    line: int | None = None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line + 1}"
        note = "" if self.line is not None else " (one statement)"
        return f"{where}{note}: {self.kind}: {self.before.strip()!r} -> {self.after.strip()!r}"

    def source(self, path: str, text: str) -> str:
        """A file's text with the change."""
        if self.line is None or path != self.path:
            return text
        lines = text.split("\n")
        assert lines[self.line] == self.before
        lines[self.line] = self.after
        return "\n".join(lines)

    def expanded(self, shader: Shader) -> Shader:
        """A preprocessed shader with the change."""
        if self.line is not None or shader.path != self.path:
            return shader
        return replace(shader, code=shader.code.replace(self.before, self.after, 1))


def _changed(text: str, rng: random.Random) -> tuple[str, str] | None:
    """A kind and the text with one change, of those that it offers; None if there is none."""
    code = text.split("//")[0] if "//#unroll" not in text else text
    begin = code.find(":") + 1 if "//#unroll" in code else 0
    offered = []
    steps = [m.span(1) for m in _STEP.finditer(code)]
    for kind, pattern, instead in _CHANGES:
        for match in pattern.finditer(code, begin):
            if any(a <= match.start() < b for a, b in steps) and "accumulate" not in kind:
                continue  # a loop that does not end says nothing
            if any(a <= match.start() < b for a, b in steps):
                continue
            offered.append((kind, match, instead))
    if not offered:
        return None
    # Each kind alike, whatever its number of places.
    kinds = sorted({kind for kind, _, _ in offered})
    kind = rng.choice(kinds)
    kind, match, instead = rng.choice([o for o in offered if o[0] == kind])
    return kind, text[: match.start()] + match.expand(
        instead(match) if callable(instead) else instead
    ) + text[match.end() :]


def of_a_file(rng: random.Random, prefixes: tuple[str, ...] = ("",)) -> Mutant:
    """A change of a line of a file whose name begins with one of these."""
    folder = wgsl.shader_folder()
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.wgsl"))
    files = [f for f in files if f.startswith(prefixes) and not f.startswith(UNREACHED)]
    while True:
        path = rng.choice(files)
        lines = (folder / path).read_text(encoding="utf-8").split("\n")
        number = rng.randrange(len(lines))
        if _SKIPPED.search(lines[number]):
            continue
        changed = _changed(lines[number], rng)
        if changed is not None:
            return _mutant(changed, path, lines[number], number)


def of_a_statement(rng: random.Random, shaders: list[Shader]) -> Mutant:
    """A change of one statement of a preprocessed shader."""
    by_path: dict[str, list[Shader]] = {}
    for shader in shaders:
        by_path.setdefault(shader.path, []).append(shader)
    paths = sorted(p for p in by_path if not p.startswith(UNREACHED))
    while True:
        path = rng.choice(paths)
        shader = rng.choice(sorted(by_path[path], key=lambda s: s.label))
        line = rng.choice(shader.code.split("\n"))
        if _SKIPPED.search(line) or "//" in line or line.startswith("const "):
            continue
        head = "for (" in line
        statements = [line] if head else [f"{s};" for s in line.split(";") if s.strip()]
        statement = rng.choice(statements or [""])
        if not statement.strip() or statement not in shader.code:
            continue
        changed = _changed(statement, rng)
        if changed is not None:
            return _mutant(changed, path, statement, None)


def _mutant(changed: tuple[str, str], path: str, before: str, line: int | None) -> Mutant:
    kind, after = changed
    after = re.sub(r"select_swapped\(", "select(", _swap(after))
    return Mutant(kind, path, before, after, line)


def _swap(text: str) -> str:
    """Exchanges the first two arguments of ``select_swapped``."""
    at = text.find("select_swapped(")
    if at < 0:
        return text
    first = at + len("select_swapped(")
    depth, commas, end = 0, [], first
    for end in range(first, len(text)):
        character = text[end]
        if character in "(<[":
            depth += 1
        elif character in ")>]":
            depth -= 1
            if depth < 0:
                break
        elif character == "," and depth == 0:
            commas.append(end)
    if len(commas) < 2:
        return text
    a, b = text[first : commas[0]], text[commas[0] + 1 : commas[1]].strip()
    return f"{text[:first]}{b}, {a}{text[commas[1] :]}"


class Loader:
    """Stands in for ``load_shader`` and remembers what was asked for.

    Attributes:
        asked: Every variant that was asked for since it was last cleared.
    """

    def __init__(self) -> None:
        self._right: dict[Key, Shader] = {}
        self._wrong: dict[Key, Shader] = {}
        self._mutant: Mutant | None = None
        self._count = 0
        self.asked: set[Key] = set()

    def __call__(self, path: str, constants: Constants = (), bound: Bindings = ()) -> Shader:
        key = (path, constants, bound)
        self.asked.add(key)
        return self.shader(key)

    def shader(self, key: Key) -> Shader:
        """The shader, with the mutant's change if there is one."""
        if key not in self._right:
            with mock.patch.object(wgsl, "shader_source", _text):
                self._right[key] = wgsl.load_shader.__wrapped__(*key)
        if self._mutant is None:
            return self._right[key]
        if key not in self._wrong:
            self._wrong[key] = self._changed(key, self._mutant)
        return self._wrong[key]

    def changes(self, key: Key) -> bool:
        """Whether the mutant changes a variant."""
        return self.shader(key) is not self._right[key]

    def _changed(self, key: Key, mutant: Mutant) -> Shader:
        right = self._right[key]
        wrong = mutant.expanded(right)
        if mutant.line is not None:
            with mock.patch.object(wgsl, "shader_source", lambda p: mutant.source(p, _text(p))):
                wrong = wgsl.load_shader.__wrapped__(*key)
        if wrong.code == right.code:
            return right
        return replace(wrong, label=f"{right.label} mutant {self._count}")

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """While it is entered, shaders have the change."""
        self._mutant, self._wrong = mutant, {}
        self._count += 1
        try:
            yield
        finally:
            self._mutant = None

    @contextmanager
    def right(self) -> Iterator[None]:
        """While it is entered, shaders are as they should be."""
        mutant, self._mutant = self._mutant, None
        try:
            yield
        finally:
            self._mutant = mutant

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it is entered, launches load their shaders here."""
        with mock.patch.object(launch, "load_shader", self):
            yield


_SOURCES: dict[str, str] = {}


def _text(path: str) -> str:
    if path not in _SOURCES:
        _SOURCES[path] = (wgsl.shader_folder() / path).read_text(encoding="utf-8")
    return _SOURCES[path]
