"""The preprocessor of WGSL sources, whose directives are comments.

    //#include common/flat.wgsl       the file's text, once per shader
    //#input 1 x: 8                   an operand of any type in any memory: gpu/operands.py
    //#output 2 y: 8
    //#if NAME  //#else  //#endif     NAME or !NAME: a known boolean, or whether the binding with
                                      that (lower-case) name is bound; inactive lines are blanked
    //#if NAME?                       the same for a boolean that is false unless it is given
    //#unroll i N: acc_$i = 0.0;      the text after the colon for i = 0 .. N-1, on one line;
                                      several counters are separated by commas
    //#unroll i N                     the same for all lines up to //#end; may be nested
    //#end

Constants are *appended* (module scope has no order) and lines keep their numbers, so that the line
numbers in the driver's messages match the shader's main file. An unknown name is an error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from qlora_wgpu.gpu.operands import Bound, Operand, parse

Constant = bool | int | float
_UNROLL = re.compile(r"^//#unroll\s+([^:]+?)\s*(?::(.*))?$")
_NAMED = re.compile(r"//#(?:input|output)\s+\d+\s+(\w+)|@binding\(\d+\)\s*var(?:<[^>]*>)?\s+(\w+)")
_COMMENT_BEGINS = re.compile(r"//[^\n]*|/\*")
GRID = ("GRID_X", "GRID_Y", "GRID_Z")
FOLD = "FOLD"
"""Constants of a shader with a folded grid: its sizes, and the width of the dispatched grid."""
IN_PARTS = "IN_PARTS"
"""A constant of shaders that are dispatched in parts of their grid."""
PART_FIELDS = tuple(f"{name}_{axis}" for name in ("first_group", "whole_grid") for axis in "xyz")
"""Their additional ``Params``: the part's first workgroup, and the size of the grid."""
_MAIN_GROUP = re.compile(r"@builtin\(workgroup_id\)\s*(\w+)(\s*:\s*vec3<u32>[^{]*)\{")
_WITHIN_COMMENT = re.compile(r"/\*|\*/")  # block comments nest


class ShaderSourceError(Exception):
    """An error in a shader file of this package, not the user's."""


_MEASURE = re.compile(
    r"^(\s*(\w+)\s*:\s*u32\s*,?)\s*//=\s*(\w+)\.(rows|columns|stride|units|elements)\s*$"
)


def without_comments(code: str) -> str:
    """WGSL with a space for each comment; lines keep their numbers.

    Searches for names in a shader use this, so that comments do not match.
    """
    kept: list[str] = []
    depth = at = 0
    while at < len(code):
        match = (_WITHIN_COMMENT if depth else _COMMENT_BEGINS).search(code, at)
        end = match.start() if match else len(code)
        kept.append("\n" * code.count("\n", at, end) if depth else code[at:end])
        at = match.end() if match else end
        mark = match.group() if match else ""
        depth += {"/*": 1, "*/": -1}.get(mark, 0)
        kept.append(" " if mark else "")
    return "".join(kept)


@dataclass
class Source:
    """A shader being read."""

    read: Callable[[str], str]  # gives the text of a file
    constants: Mapping[str, Constant]  # known values by name
    bound: Mapping[str, Bound]  # the tensors bound to operands, by name
    operands: list[Operand] = field(default_factory=list)  # the declarations met so far
    # Every possible name of a binding, active or not
    names: set[str] = field(default_factory=set)
    included: set[str] = field(default_factory=set)  # files that have been included
    # Names of bindings that were used, and where
    conditions: dict[str, str] = field(default_factory=dict)
    # Fields of ``Params`` that are sizes, with their binding and size
    measures: dict[str, tuple[str, str]] = field(default_factory=dict)

    def expand(self, path: str) -> str:
        code = self._file(path)
        bare = without_comments(code)
        for name, where in self.conditions.items():
            if name not in self.names:
                raise ShaderSourceError(f"{where}: {name} is not a binding")
        functions = "\n".join(self._functions(bare))
        whole = bare + functions
        if _says(whole, "Eight", "pack_bf16", "unpack_bf16") or "Float8" in whole:
            functions += "\n" + self._include("common/eight.wgsl", path)
        if "small_bf16(" in functions:
            functions += "\n" + self._include("common/small_bfloat16.wgsl", path)
        if _says(bare + functions, "f16_of_eight", "near_f16", "eight_of_f16", "beyond8"):
            functions += "\n" + self._include("common/eight_float16.wgsl", path)
        elif _says(functions, "pack_f16", "unpack_f16"):
            functions += "\n" + self._include("common/float16.wgsl", path)
        if "texel_at(" in bare + functions:
            functions += "\n" + self._include("common/texel.wgsl", path)
        if FOLD in self.constants:
            code = _folded(code, path)
        fields = [f"first_texel_{name}" for name in self.texture_inputs()]
        if IN_PARTS in self.constants:
            code = _in_part(code, path)
            fields += PART_FIELDS
        return _with_fields(f"{code}\n{functions}", fields, path)

    def texture_inputs(self) -> list[str]:
        """The inputs in textures, which may start anywhere in them."""
        return [o.name for o in self.operands if not o.output and self._texture(o)]

    def _texture(self, operand: Operand) -> bool:
        bound = self.bound.get(operand.name)
        return bound is not None and bound.texture

    def _functions(self, code: str) -> list[str]:
        accumulate = self.constants.get("ACCUMULATE") is True
        functions = []
        for operand in self.operands:
            bound = self.bound.get(operand.name)
            adds = accumulate and operand.sums
            before = operand.before in self.bound
            functions.append(operand.code(bound, accumulate=adds, before=before)[1])
            if bound is not None:
                called = {
                    f"broadcast_{operand.name}_": operand.broadcast,
                    f"halves_{operand.name}(": operand.halves,
                    f"rounded_{operand.name}(": operand.rounded,
                    f"store_small_{operand.name}(": operand.store_small,
                }
                functions += [made(bound) for name, made in called.items() if name in code]
        return functions

    def _file(self, path: str) -> str:
        source = self.read(path)
        self.names |= _names(source)
        lines: list[str] = []
        tail: list[str] = []
        live = [True]
        shown = True
        for number, (line, text) in enumerate(_lines(source), 1):
            if not text:
                lines.append(line if shown else "")
                continue
            where = f"{path}:{number}"
            if text.startswith("//#if "):
                live.append(self._condition(text[6:].strip(), where))
                line = ""
            elif text == "//#else":
                _inside_if(live, where)
                live[-1] = not live[-1]
                line = ""
            elif text == "//#endif":
                _inside_if(live, where)
                live.pop()
                line = ""
            elif not shown:
                line = ""
            elif text.startswith("//#include "):
                line = ""
                tail.append(self._include(text[11:].strip(), where))
            elif text.startswith(("//#input ", "//#output ")):
                line = self._operand(text, where)
            elif "//=" in line:
                line = self._measure(line, where)
            shown = all(live)
            lines.append(line)
        if len(live) != 1:
            raise ShaderSourceError(f"{path}: //#if without //#endif")
        return "\n".join([*self._unrolled(lines, path), *tail])

    def _include(self, path: str, where: str) -> str:
        if path in self.included:
            return ""
        self.included.add(path)
        return self._file(path)

    def _operand(self, text: str, where: str) -> str:
        operand = parse(text)
        if operand is None:
            raise ShaderSourceError(f"{where}: {text!r} does not declare an operand")
        self.operands.append(operand)
        bound = self.bound.get(operand.name)
        if bound is None and not operand.optional:
            bound = Bound("float32", operand.memory == "texture")  # rejected at launch
        return operand.code(bound, accumulate=False)[0]

    def _measure(self, line: str, where: str) -> str:
        match = _MEASURE.match(line)
        if match is None:
            raise ShaderSourceError(f"{where}: expected 'name: u32, //= binding.size'")
        self.measures[match[2]] = (match[3], match[4])
        self.conditions[match[3]] = where
        return match[1]

    def _condition(self, text: str, where: str) -> bool:
        name = text.removeprefix("!").removesuffix("?")
        value = self.constants.get(name, False if text.endswith("?") else None)
        if name.islower():
            self.conditions[name] = where
            value = name in self.bound
        if not isinstance(value, bool):
            raise ShaderSourceError(f"{where}: {name} is not a known boolean")
        return value != text.startswith("!")

    def _unrolled(self, lines: list[str], path: str) -> list[str]:
        """Unrolls lines and blocks, innermost first; a block is put on its last line."""
        done: list[str] = []
        open_blocks: list[tuple[int, str, str]] = []
        for number, line in enumerate(lines, 1):
            if "//#" not in line:
                done.append(line)
                continue
            where, text = f"{path}:{number}", line.strip()
            if text.startswith("//#unroll"):
                match = _UNROLL.match(text)
                if match is None:
                    raise ShaderSourceError(f"{where}: expected '//#unroll i N: text'")
                if match[2] is None:
                    open_blocks.append((len(done), match[1], where))
                    done.append("")
                else:
                    indent = line[: len(line) - len(line.lstrip())]
                    done.append(indent + self._repeat(match[1], match[2], where))
            elif text == "//#end":
                if not open_blocks:
                    raise ShaderSourceError(f"{where}: //#end without //#unroll")
                begin, counters, opened = open_blocks.pop()
                body = " ".join(
                    without_comments(part).strip() for part in done[begin:] if part.strip()
                )
                done[begin:] = [""] * (len(done) - begin)
                done.append(self._repeat(counters, body, opened))
            elif text.startswith("//#"):
                raise ShaderSourceError(f"{where}: unknown directive {text.split()[0]}")
            else:
                done.append(line)
        if open_blocks:
            raise ShaderSourceError(f"{open_blocks[-1][2]}: //#unroll without //#end")
        for number, line in enumerate(done, 1):
            if "$" in line and "$" in without_comments(line):
                raise ShaderSourceError(f"{path}:{number}: unknown counter in {line.strip()!r}")
        return done

    def _repeat(self, counters: str, body: str, where: str) -> str:
        names, ranges = [], []
        for counter in counters.split(","):
            name, _, bound = counter.strip().partition(" ")
            count = int(bound) if bound.isdigit() else self.constants.get(bound.strip())
            if not isinstance(count, int) or isinstance(count, bool):
                raise ShaderSourceError(f"{where}: {bound!r} is not a known integer")
            names.append(name)
            ranges.append(range(count))
        pieces = []
        for values in itertools.product(*ranges):
            piece = body
            for name, value in zip(names, values, strict=True):
                piece = piece.replace(f"${name}", str(value))
            pieces.append(piece.strip())
        return " ".join(pieces)


def _says(code: str, *words: str) -> bool:
    """Whether code contains any of the words; patterns that start with letters are fast."""
    return any(re.search(rf"{word}(?<=\b{word})\b", code) for word in words)


@cache
def _lines(source: str) -> tuple[tuple[str, str], ...]:
    """A file's lines, each with its directive without indentation, or an empty string."""
    return tuple(
        (line, line.strip() if "//#" in line or "//=" in line else "")
        for line in source.splitlines()
    )


@cache
def _names(source: str) -> frozenset[str]:
    """Every possible name of a file's bindings."""
    return frozenset(a or b for a, b in _NAMED.findall(source))


def _inside_if(live: list[bool], where: str) -> None:
    if len(live) == 1:
        raise ShaderSourceError(f"{where}: //#else or //#endif without //#if")


def _with_fields(code: str, names: list[str], path: str) -> str:
    """Adds generated fields to ``struct Params``."""
    if not names:
        return code
    fields = "".join(f" {name}: u32," for name in names)
    code, count = re.subn(r"(struct\s+Params\s*\{[^}]*?,?)(\s*\})", rf"\1{fields}\2", code, count=1)
    if not count:
        raise ShaderSourceError(f"{path}: struct Params is missing, needed for {', '.join(names)}")
    return code


def _folded(code: str, path: str) -> str:
    """Prepends to ``main`` the computation of its place in a grid dispatched as a rectangle."""
    code, whole = _of_grid(code, "folded_grid", "vec3<u32>(GRID_X, GRID_Y, GRID_Z)")
    place = (
        f" let place = dispatched.y * {FOLD} + dispatched.x;"
        " if (place >= GRID_X * GRID_Y * GRID_Z) { return; }"
        " let {name} = vec3<u32>(place % GRID_X, place / GRID_X % GRID_Y,"
        f" place / (GRID_X * GRID_Y));{whole}"
    )
    return _begun(code, "dispatched", place, f"{path}: a folded grid")


def _in_part(code: str, path: str) -> str:
    """Prepends to ``main`` the computation of the workgroup's place in the whole grid."""
    code, whole = _of_grid(code, "grid_of_part", _vector("whole_grid"))
    place = f" let {{name}} = group_in_part + {_vector('first_group')};{whole}"
    return _begun(code, "group_in_part", place, f"{path}: a grid in parts")


def _begun(code: str, group: str, place: str, what: str) -> str:
    """Renames the workgroup id of ``main`` and computes its own {name} from it first."""
    main = _MAIN_GROUP.search(code)
    if main is None:
        raise ShaderSourceError(f"{what} requires a main with a workgroup_id")
    begin = place.replace("{name}", main[1])
    head = f"@builtin(workgroup_id) {group}{main[2]}{{{begin}"
    return code[: main.start()] + head + code[main.end() :]


def _of_grid(code: str, name: str, size: str) -> tuple[str, str]:
    """Renames the dispatched grid's size, and returns a line that defines the whole grid's."""
    count = re.search(r"@builtin\(num_workgroups\)\s*(\w+)", code)
    if count is None:
        return code, ""
    code = code[: count.start(1)] + name + code[count.end(1) :]
    return code, f" let {count[1]} = {size};"


def _vector(name: str) -> str:
    return f"vec3<u32>({', '.join(f'params.{name}_{axis}' for axis in 'xyz')})"
