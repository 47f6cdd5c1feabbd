"""Sliding windows: which layers attend to one by config.json, and its width."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.config_reader import ConfigReader

Windows = tuple[int | None, ...]
"""The window of each layer, None where all earlier tokens are seen."""


def layer_windows(read: ConfigReader, slides: Sequence[bool]) -> Windows:
    """The windows by ``layer_types`` and ``sliding_window``.

    Args:
        read: The config.json.
        slides: For each layer, whether it slides where ``layer_types`` does not say it.

    Raises:
        UnsupportedModelError: If a layer's type is another, or there is no width.
    """
    types = read.config.get("layer_types")
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        if (
            not isinstance(types, list)
            or len(types) != len(slides)
            or not all(isinstance(name, str) and name in kinds for name in types)
        ):
            raise UnsupportedModelError(
                f"config.json: layer_types must name {' or '.join(kinds)} for each of the "
                f"{len(slides)} layers"
            )
        slides = [name == "sliding_attention" for name in types]
    if not any(slides):
        return (None,) * len(slides)
    window = read.integer("sliding_window")
    return tuple(window if slide else None for slide in slides)


def periodic_windows(read: ConfigReader, layers: int, every: int) -> Windows:
    """The windows where all layers slide but each n-th, by ``sliding_window_pattern``.

    Args:
        read: The config.json.
        layers: How many there are.
        every: The n, where neither that key nor ``layer_types`` says it.

    Raises:
        UnsupportedModelError: As ``layer_windows`` does, or if the key is no such number.
    """
    if read.config.get("layer_types") is not None:
        return layer_windows(read, [False] * layers)  # other spellings of the key do not count
    every = read.integer("sliding_window_pattern", every)
    return layer_windows(read, [(i + 1) % every != 0 for i in range(layers)])


def upper_windows(read: ConfigReader, layers: int) -> Windows:
    """The windows where ``use_sliding_window`` turns them on from ``max_window_layers`` on."""
    read = read.with_defaults(sliding_window=4096, max_window_layers=28)  # Hugging Face's
    if not read.flag("use_sliding_window") or read.config["sliding_window"] is None:
        return (None,) * layers  # layer_types may still be there, and all its layers see everything
    first = read.number("max_window_layers", 28)
    return layer_windows(read, [i >= first for i in range(layers)])
