"""The matrices of a layer's experts as those of the parameters that hold them, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from qlora_wgpu.lora.names import Float32Array

PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
KINDS = ("gate", "up", "down")

Pair = tuple[Float32Array, Float32Array]
"""Every expert's A (experts, r, in) and B (experts, out, r)."""


def stacked(
    kinds: Mapping[str, Pair], scalings: Mapping[str, float], halves: int, *, in_turns: bool
) -> Pair:
    """The pair of a parameter, of those of its parts.

    Args:
        kinds: The pairs of those parts that have any.
        scalings: What multiplies the product of each.
        halves: Parts of the parameter.
        in_turns: Whether their rows take turns.
    """
    a = np.concatenate([pair[0] for pair in kinds.values()], axis=1)
    experts, out = next(iter(kinds.values()))[1].shape[:2]
    b = np.zeros((experts, halves * out, a.shape[1]), np.float32)
    begin, scaling = 0, next(iter(scalings.values()))
    for name, (_, own) in kinds.items():
        end = begin + own.shape[2]
        factor = np.float32(scalings[name] / scaling)  # one unless their scalings differ
        rows = _rows(name, b.shape[1], in_turns=in_turns)
        b[:, rows, begin:end] = own if factor == 1 else factor * own
        begin = end
    return a, b


def _rows(kind: str, count: int, *, in_turns: bool) -> slice:
    """A kind's rows of a parameter's, of which there are so many."""
    if kind == "down":
        return slice(None)
    place = KINDS.index(kind)
    return (
        slice(place, None, 2) if in_turns else slice(place * count // 2, (place + 1) * count // 2)
    )


def parted(parameter: str, pair: Pair, *, in_turns: bool) -> dict[str, Pair]:
    """Each part's pair: parts of the rank where those of gate and up share none of it."""
    a, b = pair
    if parameter == "down_proj":
        return {"down": pair}
    half = a.shape[1] // 2
    gate, up = (b[:, _rows(kind, b.shape[1], in_turns=in_turns)] for kind in ("gate", "up"))
    if a.shape[1] % 2 == 0 and not gate[:, :, half:].any() and not up[:, :, :half].any():
        return {"gate": (a[:, :half], gate[:, :, :half]), "up": (a[:, half:], up[:, :, half:])}
    return {"gate": (a, gate), "up": (a, up)}


def again(
    pair: Pair, ranks: Mapping[str, int], factors: Mapping[str, float], *, in_turns: bool
) -> dict[str, Pair]:
    """What ``stacked`` put together: parts of the rank.

    Args:
        pair: A parameter's.
        ranks: Each part's, in the order in which they were put together.
        factors: What its B is multiplied by.
        in_turns: Whether rows of parts take turns.
    """
    (a, b), begin = pair, 0
    made: dict[str, Pair] = {}
    for kind, rank in ranks.items():
        end, factor = begin + rank, np.float32(factors[kind])
        own = b[:, _rows(kind, b.shape[1], in_turns=in_turns), begin:end]
        made[kind] = a[:, begin:end], own if math.isclose(factor, 1, rel_tol=1e-6) else own * factor
        begin = end
    return made
