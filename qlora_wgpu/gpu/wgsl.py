"""WGSL sources: finding them, preprocessing them, and reading their bindings.

A shader is a real ``.wgsl`` file. The preprocessor's directives are comments, so that editors and
parsers accept the file as it is:

    //#include common/unit4.wgsl        the file's text, once per shader
    //#include common/x.wgsl NAME=y     the same, with y put for NAME
    //#if NAME  //#else  //#endif       NAME or !NAME, a known boolean; dead lines are blanked
    //#unroll i N: acc_$i = 0.0;        the text after the colon for i = 0 .. N-1, on one line;
                                        several counters are separated by commas

Constants are *appended* (module scope has no order), so the line numbers of a shader's main file
stay true in the driver's messages. An unknown name is an error.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

Constant = bool | int | float
Constants = tuple[tuple[str, Constant], ...]

_BINDING = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(uniform|storage)\s*(?:,\s*(read|read_write)\s*)?>"
    r"\s*(\w+)\s*:\s*(?:array<(\w+(?:<\w+>)?)>)?"
)
_IMAGE = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var\s+(\w+)\s*:"
    r"\s*texture_storage_2d<\s*rgba32uint\s*,\s*(read|write)\s*>"
)
_PARAMS = re.compile(r"struct\s+Params\s*\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)\s*:\s*(\w+)\s*,?")
_WORKGROUP = re.compile(r"@workgroup_size\(([^)]*)\)")
_UNROLL = re.compile(r"^(\s*)//#unroll\s+([^:]+):(.*)$")
_FORMATS = {"u32": "I", "i32": "i", "f32": "f"}


class ShaderSourceError(Exception):
    """A shader file of this package is wrong: a programming error, not a user's."""


@dataclass(frozen=True)
class Binding:
    """One resource of a shader.

    Attributes:
        index: Its number.
        name: Its name.
        uniform: Whether it is the uniform.
        writable: Whether it is written.
        image: Whether it is an image.
        dtypes: Element types that may be bound.
    """

    index: int
    name: str
    uniform: bool
    writable: bool
    image: bool = False
    dtypes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shader:
    """A preprocessed shader.

    Attributes:
        label: The file and its constants, for the driver's messages and for timing tables.
        code: WGSL.
        bindings: By name, in the order of their indices, the uniform ``params`` left out.
        params: ``(name, struct format)`` of each field of ``Params``, in order.
        workgroup_size: Invocations along x, y, z.
    """

    label: str
    code: str
    bindings: Mapping[str, Binding]
    params: tuple[tuple[str, str], ...]
    workgroup_size: tuple[int, int, int]

    def pack_params(self, values: Mapping[str, int | float]) -> bytes:
        """Returns the bytes of the uniform ``Params``; every field must be given, and no other."""
        names = {name for name, _ in self.params}
        if names != set(values):
            raise ShaderSourceError(
                f"{self.label}: params {sorted(set(values) ^ names)} are missing or unknown"
            )
        data = b"".join(struct.pack("<" + fmt, values[name]) for name, fmt in self.params)
        return data + bytes(-len(data) % 16)


@cache
def shader_folder() -> Path:
    """The folder of the WGSL files: in the installed package, else beside it in a checkout."""
    packaged = Path(str(resources.files("qlora_wgpu"))) / "shaders"
    if packaged.is_dir():
        return packaged
    beside = packaged.parent.parent / "shaders"
    if beside.is_dir():
        return beside
    raise ShaderSourceError(f"no shaders in {packaged} or {beside}: reinstall qlora-wgpu")


@cache
def load_shader(path: str, constants: Constants = ()) -> Shader:
    """Preprocesses one shader file.

    Args:
        path: Relative to the shader folder, such as ``"rms_norm/forward.wgsl"``.
        constants: ``(name, value)`` pairs, sorted; booleans may be tested by ``//#if``.
    """
    table = dict(constants)
    code = _preprocess(path, table, included=set())
    code += "".join(f"\nconst {name} = {_literal(value)};" for name, value in constants) + "\n"
    shown = ", ".join(f"{name}={value}" for name, value in constants)
    return _reflect(f"{path}({shown})", code)


def _preprocess(path: str, constants: Mapping[str, Constant], included: set[str]) -> str:
    try:
        source = (shader_folder() / path).read_text(encoding="utf-8")
    except OSError as err:
        raise ShaderSourceError(f"shader {path} cannot be read: {err}") from err
    lines: list[str] = []
    tail: list[str] = []
    live = [True]
    for number, line in enumerate(source.splitlines(), 1):
        where = f"{path}:{number}"
        text = line.strip()
        if text.startswith("//#if "):
            live.append(_condition(text[6:].strip(), constants, where))
            lines.append("")
        elif text == "//#else":
            _inside_if(live, where)
            live[-1] = not live[-1]
            lines.append("")
        elif text == "//#endif":
            _inside_if(live, where)
            live.pop()
            lines.append("")
        elif not all(live):
            lines.append("")
        elif text.startswith("//#include "):
            if text not in included:
                included.add(text)
                tail.append(_include(text[11:], constants, included, where))
            lines.append("")
        elif text.startswith("//#unroll "):
            lines.append(_unroll(line, constants, where))
        elif text.startswith("//#"):
            raise ShaderSourceError(f"{where}: unknown directive {text.split()[0]}")
        else:
            lines.append(line)
    if len(live) != 1:
        raise ShaderSourceError(f"{path}: //#if without //#endif")
    return "\n".join(lines + tail)


def _include(text: str, constants: Mapping[str, Constant], included: set[str], where: str) -> str:
    path, *renames = text.split()
    code = _preprocess(path, constants, included)
    for rename in sorted(renames, key=len, reverse=True):
        old, equals, new = rename.partition("=")
        if not equals or old not in code:
            raise ShaderSourceError(f"{where}: {rename} renames nothing in {path}")
        code = code.replace(old, new)
    return code


def _inside_if(live: list[bool], where: str) -> None:
    if len(live) == 1:
        raise ShaderSourceError(f"{where}: //#else or //#endif without //#if")


def _condition(text: str, constants: Mapping[str, Constant], where: str) -> bool:
    name = text.removeprefix("!")
    value = constants.get(name)
    if not isinstance(value, bool):
        raise ShaderSourceError(f"{where}: {name} is not a known boolean")
    return value != text.startswith("!")


def _unroll(line: str, constants: Mapping[str, Constant], where: str) -> str:
    match = _UNROLL.match(line)
    if match is None:
        raise ShaderSourceError(f"{where}: expected '//#unroll i N: text'")
    indent, counters, body = match.groups()
    names, ranges = [], []
    for counter in counters.split(","):
        name, _, bound = counter.strip().partition(" ")
        count = int(bound) if bound.isdigit() else constants.get(bound.strip())
        if not isinstance(count, int) or isinstance(count, bool):
            raise ShaderSourceError(f"{where}: {bound!r} is not a known integer")
        names.append(name)
        ranges.append(range(count))
    pieces = []
    for values in itertools.product(*ranges):
        piece = body
        for name, value in zip(names, values, strict=True):
            piece = piece.replace(f"${name}", str(value))
        if "$" in piece:
            raise ShaderSourceError(f"{where}: unknown counter in {piece.strip()!r}")
        pieces.append(piece.strip())
    return indent + " ".join(pieces)


def _literal(value: Constant) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}u"
    return f"f32({value!r})"


def _reflect(label: str, code: str) -> Shader:
    bare = re.sub(r"//[^\n]*", "", code)
    bindings: dict[str, Binding] = {}
    for index, space, access, name, element in _BINDING.findall(bare):
        dtypes = _dtypes(element, bare)
        uniform, writable = space == "uniform", access == "read_write"
        bindings[name] = Binding(int(index), name, uniform, writable, dtypes=dtypes)
    for index, name, access in _IMAGE.findall(bare):
        dtypes = frozenset({"float32", "bfloat16"})
        bindings[name] = Binding(int(index), name, False, access == "write", True, dtypes)
    if len({b.index for b in bindings.values()}) != len(bindings):
        raise ShaderSourceError(f"{label}: two bindings share a number")
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
    return Shader(label, code, bindings, fields, (numbers[0], numbers[1], numbers[2]))


def _dtypes(element: str, code: str) -> frozenset[str]:
    """Which element types an array of WGSL's may hold."""
    if element == "vec4<u32>":  # words, copied as they are
        return frozenset({"float32", "bfloat16", "uint8", "uint32", "int32"})
    alias = re.search(rf"alias\s+{element}\s*=\s*([^;]+);", code)
    if alias is not None and alias.group(1) in ("vec4<u32>", "vec2<u32>", "u32"):
        return frozenset({"bfloat16"})
    if alias is not None:
        return _dtypes(alias.group(1), code)
    if element.endswith("i32"):
        return frozenset({"int32"})
    if "u32" in element:
        return frozenset({"uint32", "uint8", "bfloat16"})
    return frozenset({"float32"})


def _workgroup_number(text: str, code: str, label: str) -> int:
    if text.rstrip("u").isdigit():
        return int(text.rstrip("u"))
    match = re.search(rf"const\s+{text}\s*(?::\s*u32)?\s*=\s*(\d+)u?;", code)
    if match is None:
        raise ShaderSourceError(f"{label}: workgroup size {text!r} is not a known number")
    return int(match.group(1))
