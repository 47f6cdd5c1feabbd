"""Whether quantized weights are kept dequantized on the device (``device.keep_dequantized``).

It changes no bit, so it may depend on what is free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from qlora_wgpu.gpu.memory_size import SPARE_SHARE, available_bytes, machine_bytes
from qlora_wgpu.model.layout import ModelLayout

KeepDequantized = bool | Literal["auto"]


def with_kept(layout: ModelLayout, *, kept: bool = True) -> ModelLayout:
    """The same model, of which nothing is loaded yet, with such weights or without them."""
    return layout.waiting(replace(layout.residency, dequantized=kept))


def laid_out_for(
    layout: ModelLayout,
    asked: KeepDequantized,
    *,
    is_cpu: bool,
    budget: int | None,
    beside: int = 0,
) -> ModelLayout:
    """A layout with such weights where they are asked for.

    ``"auto"`` asks for them on a software GPU whose memory has no bound: there main memory is
    plentiful, and what dequantizing takes was measured.

    Args:
        layout: The model, of which nothing is loaded yet.
        asked: Whether they are kept.
        is_cpu: Whether it is for a software GPU.
        budget: Bytes of ``device.memory``.
        beside: Bytes that the model may take for copies that texts read, which come first.
    """
    nbytes = layout.dequantized_bytes
    if asked is True:
        return with_kept(layout)
    if asked is False or not is_cpu or budget is not None or not nbytes:
        return layout
    return with_kept(layout) if has_room(nbytes + beside) else layout


def has_room(nbytes: int) -> bool:
    """Whether a model that takes so many bytes leaves the machine most of its memory, and fits."""
    there, free = machine_bytes(), available_bytes()
    return there is not None and SPARE_SHARE * nbytes <= there and (free is None or nbytes <= free)
