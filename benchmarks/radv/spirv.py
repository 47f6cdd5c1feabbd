"""What is read off a SPIR-V module: its entry point, its bindings and its barriers."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_ENTRY_POINT, _VARIABLE, _DECORATE, _BARRIER = 15, 59, 71, 224
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


def barriers(code: bytes) -> int:
    """How often a module's text waits for its workgroup."""
    return sum(operation == _BARRIER for operation, _ in _instructions(code))


def _instructions(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at = _HEADER
    while at < len(words):
        length = words[at] >> 16
        yield words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length
