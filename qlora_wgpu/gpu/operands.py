"""Typed operands of shaders: one declaration, and generated code for any bound tensor.

    //#input 1 x: 8               load_x(i) gives elements 8·i … 8·i+7 as float32
    //#output 2 y: 8              store_y(i, v) rounds and stores them

An operand is declared by how many neighbouring elements are read or written at a time: 8 as
``Eight`` (``shaders/common/eight.wgsl``), 4 as ``vec4<f32>``, 2 as ``vec2<f32>``, 1 as ``f32``
(inputs only), or ``words``: 16 raw bytes of any type. The shader does not depend on whether the
bound tensor is float32, bfloat16 or float16, or whether it is in a buffer or in a texture. Inputs
also have ``raw_x(i)``, the elements as stored (a ``Raw_x``), ``unpack_x(raw)``, and
``broadcast_x_3(v)``, the value loaded by invocation 3 of the subgroup. Inputs of eight also have
``halves_x(raw)``, the same as float16, and ``beyond_x(raw)``, the number of finite elements outside
float16's range. Outputs also have ``rounded_y(v)``, the value of a load after ``v`` is stored, and
outputs of eight ``store_small_y(i, v)``, which requires a ``v`` without NaN and within float16's
range.

Words after the width restrict this:

    ``?`` after the name    optional; loads give zeros if it is not bound
    ``texture``, ``buffer`` the kernel requires this kind of memory
    ``float32``             the only allowed type
    ``sum``                 (outputs) with ACCUMULATE, stores add to the existing float32 values,
                            or to the input ``y_before`` if it is bound
    ``table``               only some rows are accessed, so tools do not count all bytes
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DECLARATION = re.compile(
    r"^//#(input|output)\s+(\d+)\s+(\w+)(\?)?:\s*(8|4|2|1|words)((?:\s+(?:texture|buffer|float32|sum|table))*)$"
)
FLOATS = frozenset({"float32", "bfloat16", "float16"})
ANYTHING = FLOATS | {"uint8", "uint32", "int32"}
_VALUE = {"8": "Eight", "4": "vec4<f32>", "2": "vec2<f32>", "1": "f32", "words": "vec4<u32>"}
_ZERO = {
    "8": "Eight(vec4<f32>(0.0), vec4<f32>(0.0))",
    "words": "vec4<u32>(0u)",
    **{width: f"{_VALUE[width]}(0.0)" for width in ("4", "2", "1")},
}
# Element types of a buffer's array.
_HALVES = {"8": "vec4<u32>", "4": "vec2<u32>", "2": "u32", "1": "u32"}
_STORED = {
    "bfloat16": _HALVES,
    "float16": _HALVES,
    "float32": {"8": "Float8", "4": "vec4<f32>", "2": "vec2<f32>", "1": "f32"},
}
_UNPACKED = {
    "bfloat16": {
        "8": "eight_of_bf16(raw)",
        "4": "unpack_bf16(raw)",
        "2": "bitcast<vec2<f32>>(vec2<u32>(raw << 16u, raw & 0xffff0000u))",
    },
    "float16": {"8": "eight_of_f16(raw)", "4": "unpack_f16(raw)", "2": "unpack2x16float(raw)"},
    "float32": {"8": "eight(raw.lo, raw.hi)", "4": "raw", "2": "raw"},
}
_PACKED = {
    "bfloat16": {
        "8": "bf16_of_eight(v)",
        "4": "pack_bf16(v)",
        "2": "pack_bf16(vec4<f32>(v, 0.0, 0.0)).x",
    },
    "float16": {
        "8": "f16_of_eight(v)",
        "4": "pack_f16(v)",
        "2": "pack_f16(vec4<f32>(v, 0.0, 0.0)).x",
    },
    "float32": {"8": "Float8(low(v), high(v))", "4": "v", "2": "v"},
}
# The same for eight values without NaN and within float16's range.
_SMALL_PACKED = {
    "bfloat16": "small_bf16(v)",
    "float16": "near_f16(v)",
    "float32": _PACKED["float32"]["8"],
}
# One of the two elements of a word.
_OF_WORD = {
    "bfloat16": "return bitcast<f32>(select(raw & 0xffff0000u, raw << 16u, i % 2u == 0u));",
    "float16": "return unpack2x16float(raw)[i % 2u];",
}
# Elements as stored, from 16-byte texels t(·).
_HALVES_FROM_TEXELS = {
    "8": "return {t}(i);",
    "4": "let texel = {t}(i / 2u); return select(texel.xy, texel.zw, i % 2u == 1u);",
    "2": "return {t}(i / 4u)[i % 4u];",
    "1": "return {t}(i / 8u)[i / 2u % 4u];",
}
_FROM_TEXELS = {
    "bfloat16": _HALVES_FROM_TEXELS,
    "float16": _HALVES_FROM_TEXELS,
    "float32": {
        "8": "return Float8(bitcast<vec4<f32>>({t}(2u * i)), "
        "bitcast<vec4<f32>>({t}(2u * i + 1u)));",
        "4": "return bitcast<vec4<f32>>({t}(i));",
        "2": "let texel = bitcast<vec4<f32>>({t}(i / 2u)); "
        "return select(texel.xy, texel.zw, i % 2u == 1u);",
        "1": "return bitcast<f32>({t}(i / 4u)[i % 4u]);",
    },
}


@dataclass(frozen=True)
class Bound:
    """The element type of a bound tensor, and whether it is in a texture."""

    dtype: str
    texture: bool = False


@dataclass(frozen=True)
class Operand:
    """A declaration."""

    index: int  # the binding's number
    name: str  # the binding's name
    output: bool
    width: str  # elements at a time, or ``"words"``
    optional: bool  # whether it may be unbound
    memory: str  # ``"texture"`` or ``"buffer"`` if required, else ``"any"``
    dtypes: frozenset[str]  # the allowed element types
    sums: bool  # whether stores can add
    table: bool  # whether only some of its rows are accessed

    @property
    def before(self) -> str:
        """The input that stores add to, if it is not the output itself."""
        return f"{self.name}_before"

    def memory_of(self, bound: Bound | None, *, accumulate: bool) -> str:
        """``memory`` for a bound tensor: halves of texels, and sums in place, require a buffer."""
        if self.output and self.memory == "any" and bound is not None:
            half = self.width == "4" and bound.dtype != "float32"
            if half or (self.sums and accumulate):
                return "buffer"
        return self.memory

    def code(
        self, bound: Bound | None, *, accumulate: bool, before: bool = False
    ) -> tuple[str, str]:
        value = _VALUE[self.width]
        if bound is None:
            return "", f"fn load_{self.name}(i: u32) -> {value} {{ return {_ZERO[self.width]}; }}"
        if self.width == "words":
            return self._words(bound)
        stored = _STORED[bound.dtype][self.width]
        if self.output:
            return self._output(bound, value, stored, accumulate=accumulate, before=before)
        return self._input(bound, value, stored)

    def _declaration(self, bound: Bound, stored: str) -> str:
        at = f"@group(0) @binding({self.index}) var"
        if bound.texture:
            access = "write" if self.output else "read"
            return f"{at} {self.name}: texture_storage_2d<rgba32uint, {access}>;"
        access = "read_write" if self.output else "read"
        return f"{at}<storage, {access}> {self.name}: array<{stored}>;"

    def _texel(self) -> str:
        name = self.name
        return (
            f"fn texel_{name}(i: u32) -> vec4<u32> {{ "
            f"return textureLoad({name}, texel_at(params.first_texel_{name} + i)); }}\n"
        )

    def _words(self, bound: Bound) -> tuple[str, str]:
        declared = self._declaration(bound, "vec4<u32>")
        name = self.name
        if not self.output:
            read = f"texel_{name}(i)" if bound.texture else f"{name}[i]"
            head = self._texel() if bound.texture else ""
            return declared, f"{head}fn load_{name}(i: u32) -> vec4<u32> {{ return {read}; }}"
        write = f"textureStore({name}, texel_at(i), v)" if bound.texture else f"{name}[i] = v"
        return declared, f"fn store_{name}(i: u32, v: vec4<u32>) {{ {write}; }}"

    def _input(self, bound: Bound, value: str, stored: str) -> tuple[str, str]:
        name = self.name
        if bound.texture:
            body = _FROM_TEXELS[bound.dtype][self.width].format(t=f"texel_{name}")
            code = self._texel()
        else:
            halves = bound.dtype in _OF_WORD and self.width == "1"
            body = f"return {name}[{'i / 2u' if halves else 'i'}];"
            code = ""
        code += f"alias Raw_{name} = {stored};\n"
        code += f"fn raw_{name}(i: u32) -> {stored} {{ {body} }}\n"
        if self.width == "1":
            of_word = _OF_WORD.get(bound.dtype, "return raw;")
            loaded = f"let raw = raw_{name}(i); {of_word}"
            return self._declaration(bound, stored), (
                f"{code}fn load_{name}(i: u32) -> f32 {{ {loaded} }}"
            )
        unpacked = _UNPACKED[bound.dtype][self.width]
        code += f"fn unpack_{name}(raw: {stored}) -> {value} {{ return {unpacked}; }}\n"
        code += f"fn load_{name}(i: u32) -> {value} {{ return unpack_{name}(raw_{name}(i)); }}"
        return self._declaration(bound, stored), code

    def halves(self, bound: Bound) -> str:
        name, stored = self.name, _STORED[bound.dtype]["8"]
        same = bound.dtype == "float16"
        halves = "raw" if same else f"f16_of_eight(unpack_{name}(raw))"
        beyond = "0u" if same else f"beyond8(unpack_{name}(raw))"
        return (
            f"fn halves_{name}(raw: {stored}) -> vec4<u32> {{ return {halves}; }}\n"
            f"fn beyond_{name}(raw: {stored}) -> u32 {{ return {beyond}; }}"
        )

    def rounded(self, bound: Bound) -> str:
        value, types = _VALUE[self.width], (_PACKED[bound.dtype], _UNPACKED[bound.dtype])
        packed, unpacked = (each[self.width] for each in types)
        body = "" if bound.dtype == "float32" else f"let raw = {packed}; return {unpacked};"
        return f"fn rounded_{self.name}(v: {value}) -> {value} {{ {body or 'return v;'} }}"

    def broadcast(self, bound: Bound) -> str:
        """``broadcast_x``, which needs subgroups."""
        value = _VALUE[self.width]
        parts = "Eight(subgroupBroadcast(v.even, {0}), subgroupBroadcast(v.odd, {0}))"
        body = parts if value == "Eight" else "subgroupBroadcast(v, {0})"
        # The invocation must be a constant expression: one function for each.
        return "\n".join(
            f"fn broadcast_{self.name}_{lane}(v: {value}) -> {value} "
            f"{{ return {body.format(f'{lane}u')}; }}"
            for lane in range(16)
        )

    def _output(
        self, bound: Bound, value: str, stored: str, *, accumulate: bool, before: bool
    ) -> tuple[str, str]:
        name, packed = self.name, _PACKED[bound.dtype][self.width]
        given = "v"
        if accumulate and before:
            added = f"load_{self.before}(i)"
            total = f"add8({added}, added)" if self.width == "8" else f"{added} + added"
            given = "added"
            body = f"let v = {total}; {self._stored(bound, packed, accumulate=False)}"
        else:
            body = self._stored(bound, packed, accumulate=accumulate)
        return self._declaration(bound, stored), (
            f"fn store_{name}(i: u32, {given}: {value}) {{ {body} }}"
        )

    def store_small(self, bound: Bound) -> str:
        body = self._stored(bound, _SMALL_PACKED[bound.dtype], accumulate=False)
        return f"fn store_small_{self.name}(i: u32, v: Eight) {{ {body} }}"

    def _stored(self, bound: Bound, packed: str, *, accumulate: bool) -> str:
        """The statements that store ``v`` at ``i``."""
        name = self.name
        if bound.texture and bound.dtype in _OF_WORD:
            body = f"textureStore({name}, texel_at(i), {packed});"
        elif bound.texture and self.width == "4":
            body = f"textureStore({name}, texel_at(i), bitcast<vec4<u32>>({packed}));"
        elif bound.texture:
            body = (
                f"textureStore({name}, texel_at(2u * i), bitcast<vec4<u32>>(low(v))); "
                f"textureStore({name}, texel_at(2u * i + 1u), bitcast<vec4<u32>>(high(v)));"
            )
        elif not accumulate:
            body = f"{name}[i] = {packed};"
        elif self.width == "8":
            body = f"{name}[i].lo += low(v); {name}[i].hi += high(v);"
        else:
            body = f"{name}[i] += v;"
        return body


def parse(line: str) -> Operand | None:
    """Parses a declaration; None if the line is not one."""
    match = _DECLARATION.match(line.strip())
    if match is None:
        return None
    direction, index, name, optional, width, qualifiers = match.groups()
    given = set(qualifiers.split())
    output, sums = direction == "output", "sum" in given
    memory = "any"
    if "texture" in given:
        memory = "texture"
    elif "buffer" in given or (output and width not in ("8", "4", "words")):
        memory = "buffer"
    dtypes = ANYTHING if width == "words" else FLOATS
    if "float32" in given:
        dtypes = frozenset({"float32"})
    return Operand(
        int(index), name, output, width, bool(optional), memory, dtypes, sums, "table" in given
    )
