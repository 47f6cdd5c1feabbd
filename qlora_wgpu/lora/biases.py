"""Biases that PEFT trained beside an adapter (``bias: lora_only`` or ``all``): names and checks.

They take the place of the base's own. Nothing here trains them; they are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

KINDS = ("none", "lora_only", "all")

_PREFIX = "base_model.model."
_BIAS = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+?)(?<!\.lora_[AB])(?:\.base_layer)?\.bias")


def bias_name(module: str) -> str:
    """The name of a module's bias among an adapter's tensors, whether that has a pair or not."""
    return f"{_PREFIX}{module}.bias"


def module_of(name: str) -> str | None:
    """The module whose bias a tensor of a file is; None if it is no bias.

    PEFT wraps layers that have a pair, and calls their own biases ``base_layer.bias``.
    """
    match = _BIAS.fullmatch(name)
    return None if match is None else match["module"]


def split_biases(
    tensors: Mapping[str, Float32Array],
) -> tuple[dict[str, Float32Array], dict[str, Float32Array]]:
    """An adapter's tensors without biases, and its biases by their modules."""
    pairs, biases = {}, {}
    for name, array in tensors.items():
        module = module_of(name)
        if module is None:
            pairs[name] = array
        else:
            biases[module] = array
    return pairs, biases
