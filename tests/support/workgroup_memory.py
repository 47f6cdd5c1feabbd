"""Shaders whose workgroup memory begins with NaN instead of WGSL's zeros."""

from __future__ import annotations

import re

_VARIABLE = re.compile(r"\bvar<workgroup>\s+(\w+)\s*:\s*([^;]+);")
_ENTRY = re.compile(r"@workgroup_size\(([^)]*)\)\s*fn main\(")
_INDEX = re.compile(r"@builtin\(local_invocation_index\)\s*(\w+)")
_NAN = "0x7fc17fc1u"  # as float32, and in both halves as bfloat16


def poisoned(code: str) -> str:
    """A shader that fills its workgroup memory with NaN before it does anything."""
    variables = _VARIABLE.findall(code)
    entry = _ENTRY.search(code)
    if not variables or entry is None:
        return code
    index = _INDEX.search(code, entry.end())
    name = index[1] if index else "poison_index"
    given = "" if index else f"@builtin(local_invocation_index) {name}: u32, "
    body = code.index("{", entry.end())
    threads = " * ".join(f"u32({size.strip()})" for size in entry[1].split(","))
    # Not a constant, which may not be NaN.
    fill = f" let poison = bitcast<f32>({_NAN} | min({name}, 1u));"
    fill += "".join(_filled(*variable, first=name, step=threads) for variable in variables)
    fill += " workgroupBarrier();"
    return f"{code[: entry.end()]}{given}{code[entry.end() : body + 1]}{fill}{code[body + 1 :]}"


def _filled(place: str, kind: str, first: str = "0u", step: str = "1u", depth: int = 0) -> str:
    kind = kind.strip()
    if kind.startswith("array<"):
        element, count = kind[len("array<") : -1].rsplit(",", 1)
        at = f"poison_{depth}"
        inner = _filled(f"{place}[{at}]", element, depth=depth + 1)
        return f" for (var {at} = {first}; {at} < {count}; {at} += {step}) {{{inner} }}"
    if kind == "atomic<u32>":
        return f" atomicStore(&{place}, {_NAN});"
    if "u32" in kind:
        return f" {place} = {kind}({_NAN});"
    if kind == "Float8":
        return f" {place} = Float8(vec4<f32>(poison), vec4<f32>(poison));"
    return f" {place} = {kind}(poison);"
