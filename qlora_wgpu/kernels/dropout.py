"""Dropout without state: a mask is a function of (micro-batch key, module key, element)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of a module's input a training batch drops.

    Attributes:
        probability: That an element is dropped.
        key: Tells the module's masks from those of others.
    """

    probability: float
    key: int


def dropout_params(mask: DropoutMask | None) -> dict[str, int | float]:
    """The uniform fields that ``common/dropout.wgsl`` reads."""
    if mask is None:
        return {"module_key": 0, "keep_below": 0, "keep_scale": 1.0}
    kept = 1 - mask.probability
    return {
        "module_key": mask.key,
        "keep_below": min(round(kept * 2**32), 2**32 - 1),
        "keep_scale": 1 / kept,
    }
