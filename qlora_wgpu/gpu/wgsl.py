"""Shaders: variants, bindings, uniforms, and grids of workgroups."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

from qlora_wgpu.files import file_text, is_dir
from qlora_wgpu.gpu.operands import ANYTHING, Bound, Operand
from qlora_wgpu.gpu.preprocessor import (
    FOLD,
    GRID,
    Constant,
    ShaderSourceError,
    Source,
    without_comments,
)
from qlora_wgpu.limits import MIB

__all__ = ["Binding", "Constant", "Constants", "Shader", "ShaderSourceError", "load_shader"]

# ---- grids -----------------------------------------------------------------------------------

MAX_WORKGROUPS = 65_535  # along each dimension, WebGPU's default limit

Workgroups = tuple[int, int, int]


def is_within_limits(workgroups: Workgroups) -> bool:
    return max(workgroups) <= MAX_WORKGROUPS


def fold_workgroups(count: int) -> Workgroups:
    """Spreads a one-dimensional count of workgroups over x and y.

    Shaders of such grids (``common/flat.wgsl``) compute the index as ``workgroup_id.y *
    num_workgroups.x + workgroup_id.x`` and return if it is out of range.
    """
    if count <= MAX_WORKGROUPS:
        return (max(count, 1), 1, 1)
    rows = -(-count // MAX_WORKGROUPS)
    return (-(-count // rows), rows, 1)


def fold_grid(workgroups: Workgroups) -> tuple[Workgroups, dict[str, Constant]]:
    """The dispatched grid, and the constants with which a shader computes its place.

    A grid beyond the limits is dispatched as a rectangle with enough workgroups; the preprocessor
    adds the computation of the place to ``main``.
    """
    if is_within_limits(workgroups):
        return workgroups, {}
    folded = fold_workgroups(math.prod(workgroups))
    sizes = dict(zip(GRID, workgroups, strict=True))
    return folded, {**sizes, FOLD: folded[0]}


# ---- uniforms --------------------------------------------------------------------------------

_DECLARATION = "var<uniform> params: Params;"
_MAIN = re.compile(r"\bfn\s+main\s*\([^{]*\{")


def hoist_uniform_loads(code: str) -> str:
    """Makes ``main`` copy all of ``params`` first; lines keep their numbers.

    Mesa's software GPU reads a uniform once for all invocations only before the first return,
    branch or loop. Elsewhere each invocation reads it, about thirty instructions per word.
    Compilers that prove uniform control flow reject such copies (``Backend.proves_uniformity``).
    """
    if _DECLARATION not in code:
        return code
    copied = "var<uniform> given_params: Params; var<private> params: Params;"
    code = code.replace(_DECLARATION, copied)
    return _MAIN.sub(lambda main: f"{main[0]} params = given_params;", code, count=1)


# ---- shaders ---------------------------------------------------------------------------------

Constants = tuple[tuple[str, Constant], ...]
Bindings = tuple[tuple[str, Bound], ...]

_BINDING = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(uniform|storage)\s*(?:,\s*(read|read_write)\s*)?>"
    r"\s*(\w+)\s*:\s*(?:array<(\w+(?:<\w+>)?)>)?"
)
_TEXTURE = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var\s+(\w+)\s*:"
    r"\s*texture_storage_2d<\s*rgba32uint\s*,\s*(read|write)\s*>"
)
_PARAMS = re.compile(r"struct\s+Params\s*\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)\s*:\s*(\w+)\s*,?")
_WORKGROUP = re.compile(r"@workgroup_size\(([^)]*)\)")
# A namespace of Direct3D's compiler DXC, which naga does not escape.
_TAKEN_NAME = re.compile(r"dx(?<=\bdx)\b")  # much faster if it starts with letters
_FORMATS = {"u32": "I", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class Binding:
    """One resource of a shader."""

    index: int  # the number of the binding
    name: str  # the name of the variable
    uniform: bool
    writable: bool
    texture: bool = False
    memory: str = "buffer"  # or ``"texture"`` if the kernel requires one, else ``"any"``
    dtypes: frozenset[str] = ANYTHING  # allowed element types
    optional: bool = False  # whether it may be unbound
    sums: bool = False  # whether the kernel can add to existing values
    table: bool = False  # whether the kernel accesses only some of its rows
    width: int = 1  # the kernel's unit in elements; 0 for units of 16 bytes


@dataclass(frozen=True)
class Measure:
    """A field of ``Params`` that is a tensor's size and need not be passed.

    It is the tensor's rows or columns, its stride or size in units of the declared width, or its
    stride in elements. Such a field is recognized by its name (``x_stride`` for a binding x), or by
    a comment after it: ``rows: u32, //= x.rows``.
    """

    binding: str
    what: str
    width: int


@dataclass(frozen=True)
class Shader:
    """A variant of a shader."""

    label: str  # the file, its constants and bindings, for the driver's messages
    path: str  # the file
    code: str  # WGSL
    bindings: Mapping[str, Binding]  # by name, in the order of their indices, without ``params``
    params: tuple[tuple[str, str], ...]  # name and struct format of each field of ``Params``
    workgroup_size: tuple[int, int, int]  # invocations along x, y, z
    subgroup_size: int = 0  # the size that it relies on (constant SUBGROUP_SIZE); 0 if none
    measures: Mapping[str, Measure] = field(default_factory=dict)  # fields that are tensor sizes

    def pack_params(self, values: Mapping[str, int | float]) -> bytes:
        """The bytes of the uniform ``Params``; exactly its fields must be given."""
        names, fields = self._fields
        if values.keys() != names.keys():
            wrong = sorted(values.keys() ^ names.keys())
            raise ShaderSourceError(f"{self.label}: params {wrong} are missing or unknown")
        return fields.pack(*[values[name] for name in names])

    @cached_property
    def _fields(self) -> tuple[dict[str, str], struct.Struct]:
        """The fields of ``Params`` and their layout, padded to 16 bytes."""
        padding = -4 * len(self.params) % 16
        return dict(self.params), struct.Struct(
            f"<{''.join(fmt for _, fmt in self.params)}{padding}x"
        )

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(name for name, binding in self.bindings.items() if not binding.optional)


@cache
def shader_folder() -> Path:
    """The folder of the WGSL files: in the installed package, or next to it in a checkout."""
    packaged = Path(str(resources.files("qlora_wgpu"))) / "shaders"
    if is_dir(packaged):
        return packaged
    beside = packaged.parent.parent / "shaders"
    if is_dir(beside):
        return beside
    raise ShaderSourceError(f"no shaders found in {packaged} or {beside}: reinstall qlora-wgpu")


@cache
def load_shader(path: str, constants: Constants = (), bound: Bindings = ()) -> Shader:
    """Preprocesses a shader file, given by its path within the shader folder.

    Constants, whose booleans ``//#if`` can test, and bindings are sorted by name.
    """
    source = Source(shader_source, dict(constants), dict(bound))
    code = source.expand(path)
    code += "".join(f"\nconst {name} = {_literal(value)};" for name, value in constants) + "\n"
    shown = [f"{name}={value}" for name, value in constants]
    shown += [f"{n} {b.dtype}{' texture' * b.texture}" for n, b in bound]
    adds, given = dict(constants).get("ACCUMULATE") is True, dict(bound)
    memories = {
        operand.name: operand.memory_of(
            given.get(operand.name), accumulate=adds and operand.before not in given
        )
        for operand in source.operands
    }
    shader = _reflect(f"{path}({', '.join(shown)})", path, code, source.operands, memories)
    size = int(dict(constants).get("SUBGROUP_SIZE", 0))
    return replace(shader, subgroup_size=size, measures=_measures(shader, source))


@cache
def shader_source(path: str) -> str:
    try:
        return file_text(shader_folder() / path, MIB)
    except OSError as err:
        raise ShaderSourceError(f"cannot read shader {path}: {err}") from err


def _literal(value: Constant) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}u"
    return f"f32({value!r})"


def _reflect(
    label: str, path: str, code: str, operands: list[Operand], memories: Mapping[str, str]
) -> Shader:
    bare = without_comments(code)
    bindings: dict[str, Binding] = {}
    for index, space, access, name, element in _BINDING.findall(bare):
        uniform, writable = space == "uniform", access == "read_write"
        width = int(element[3]) if element.startswith("vec") else 1
        bindings[name] = Binding(
            int(index), name, uniform, writable, dtypes=_dtypes(element), width=width
        )
    for index, name, access in _TEXTURE.findall(bare):
        bindings[name] = Binding(int(index), name, False, access == "write", True, "texture")
    for operand in operands:
        _check_once(label, operand, operands)
        bindings[operand.name] = Binding(
            operand.index,
            operand.name,
            False,
            operand.output,
            operand.name in bindings and bindings[operand.name].texture,
            memories[operand.name],
            operand.dtypes,
            operand.optional,
            operand.sums,
            operand.table,
            0 if operand.width == "words" else int(operand.width),
        )
    if len({b.index for b in bindings.values()}) != len(bindings):
        raise ShaderSourceError(f"{label}: two bindings have the same index")
    fields: tuple[tuple[str, str], ...] = ()
    if "params" in bindings:
        match = _PARAMS.search(bare)
        if match is None or bindings.pop("params").index != 0:
            raise ShaderSourceError(f"{label}: binding 0 must be params: Params")
        fields = tuple((name, _FORMATS[kind]) for name, kind in _FIELD.findall(match.group(1)))
    sizes = _WORKGROUP.search(bare)
    if sizes is None:
        raise ShaderSourceError(f"{label}: no @workgroup_size")
    numbers = [_workgroup_number(part.strip(), bare, label) for part in sizes.group(1).split(",")]
    numbers += [1] * (3 - len(numbers))
    code = _TAKEN_NAME.sub("x_gradient", code)
    return Shader(label, path, code, bindings, fields, (numbers[0], numbers[1], numbers[2]))


def _measures(shader: Shader, source: Source) -> dict[str, Measure]:
    """The fields of ``Params`` that are sizes, including those of unbound operands."""
    ends = [(name, name.removesuffix("_stride")) for name, _ in shader.params]
    named = {name: (start, "stride") for name, start in ends if start in source.names - {name}}
    return {
        name: Measure(binding, what, shader.bindings[binding].width)
        if binding in shader.bindings
        else Measure(binding, what, 1)
        for name, (binding, what) in (named | source.measures).items()
    }


def _check_once(label: str, operand: Operand, operands: list[Operand]) -> None:
    if sum(other.name == operand.name for other in operands) > 1:
        raise ShaderSourceError(f"{label}: {operand.name} is declared twice")


def _dtypes(element: str) -> frozenset[str]:
    if element.endswith(("i32", "i32>")):
        return frozenset({"int32"})
    if "u32" in element:
        return frozenset({"uint32", "uint8"})
    return frozenset({"float32"})


def _workgroup_number(text: str, code: str, label: str) -> int:
    if text.rstrip("u").isdigit():
        return int(text.rstrip("u"))
    match = re.search(rf"const\s+{text}\s*(?::\s*u32)?\s*=\s*(\d+)u?;", code)
    if match is None:
        raise ShaderSourceError(f"{label}: workgroup size {text!r} is not a known number")
    return int(match.group(1))
