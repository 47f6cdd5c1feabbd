"""Multimodal RoPE of texts, which is plain RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief

_AXES = 3  # time, height, width
_OWN = ("mrope_section", "mrope_interleaved")


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose rotation is that of texts.

    Each pair of a head is rotated by its frequency times one of the token's three positions, in
    time, height or width; ``mrope_section`` says by which one. A text's tokens have the same number
    in all three, so every division into sections gives plain RoPE's angles.

    Raises:
        UnsupportedModelError: If there are no sections for each of the three.
    """
    plain = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            _check(rope)
            plain[key] = {name: value for name, value in rope.items() if name not in _OWN}
    return plain


def _check(rope: Mapping[str, Any]) -> None:
    sections = rope.get("mrope_section", [0] * _AXES)
    is_list = isinstance(sections, list) and len(sections) == _AXES
    if not is_list or not all(type(size) is int and size >= 0 for size in sections):
        raise UnsupportedModelError(
            f"config.json: RoPE's mrope_section must be {_AXES} numbers of pairs, got "
            f"{brief(sections)}"
        )
    if type(rope.get("mrope_interleaved", True)) is not bool:
        raise UnsupportedModelError(
            "config.json: RoPE's mrope_interleaved must be true or false, got "
            f"{brief(rope['mrope_interleaved'])}"
        )
