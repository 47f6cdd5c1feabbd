"""What is read off a SPIR-V module: its entry point, bindings, barriers and matrices."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Operations, by their names in the specification.
_MEMORY_MODEL, _ENTRY_POINT, _EXECUTION_MODE, _CAPABILITY = 14, 15, 16, 17
_TYPE_VOID, _TYPE_FUNCTION, _FUNCTION, _FUNCTION_END, _VARIABLE = 19, 33, 54, 56, 59
_DECORATE, _BARRIER, _LABEL, _RETURN = 71, 224, 248, 253
_MATRICES = 6022  # the capability CooperativeMatrixKHR
_BINDING, _SET = 33, 34
_HEADER = 5  # words
# Storage classes, and Vulkan's descriptor types of what this project's shaders have in them.
_STORAGE_IMAGE, _UNIFORM_BUFFER, _STORAGE_BUFFER = 3, 6, 7
_DESCRIPTORS = {0: _STORAGE_IMAGE, 2: _UNIFORM_BUFFER, 12: _STORAGE_BUFFER}


def interface(code: bytes) -> tuple[bytes, dict[int, dict[int, int]]]:
    """A module's entry point, and by set and binding the types of its descriptors."""
    entry = b""
    decorations: dict[int, dict[int, int]] = {}
    classes: dict[int, int] = {}
    for operation, operands in _instructions(code):
        if operation == _ENTRY_POINT:
            text = struct.pack(f"<{len(operands) - 2}I", *operands[2:])
            entry = text.partition(b"\0")[0]
        elif operation == _DECORATE and operands[1] in (_BINDING, _SET):
            decorations.setdefault(operands[0], {})[operands[1]] = operands[2]
        elif operation == _VARIABLE:
            classes[operands[1]] = operands[2]
    sets: dict[int, dict[int, int]] = {}
    for variable, own in decorations.items():
        sets.setdefault(own[_SET], {})[own[_BINDING]] = _DESCRIPTORS[classes[variable]]
    return entry, sets


def empty_module(entry: bytes) -> bytes:
    """A compute shader with this entry point that does nothing."""
    name = entry + bytes(4 - len(entry) % 4)
    void, function, main, label = 1, 2, 3, 4
    instructions = [
        (_CAPABILITY, 1),  # Shader
        (_MEMORY_MODEL, 0, 1),  # Logical, GLSL450
        (_ENTRY_POINT, 5, main, *struct.unpack(f"<{len(name) // 4}I", name)),  # GLCompute
        (_EXECUTION_MODE, main, 17, 1, 1, 1),  # LocalSize
        (_TYPE_VOID, void),
        (_TYPE_FUNCTION, function, void),
        (_FUNCTION, void, main, 0, function),
        (_LABEL, label),
        (_RETURN,),
        (_FUNCTION_END,),
    ]
    words = [0x07230203, 0x00010000, 0, label + 1, 0]
    for operation, *operands in instructions:
        words += [(len(operands) + 1) << 16 | operation, *operands]
    return struct.pack(f"<{len(words)}I", *words)


def barriers(code: bytes) -> int:
    """How often a module's text waits for its workgroup."""
    return sum(operation == _BARRIER for operation, _ in _instructions(code))


def uses_matrix_units(code: bytes) -> bool:
    """Whether subgroups of a module multiply matrices."""
    return (_CAPABILITY, (_MATRICES,)) in _instructions(code)


def _instructions(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at = _HEADER
    while at < len(words):
        length = words[at] >> 16
        yield words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length
