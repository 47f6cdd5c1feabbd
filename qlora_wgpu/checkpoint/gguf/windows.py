"""Sliding windows by a GGUF file's keys, as config.json has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.errors import CheckpointError

Config = dict[str, Any]


def window_pattern(keys: Keys, config: Config, usual: int) -> Config:
    """``layer_types``: all slide but every so manieth layer, or those of a list.

    Args:
        keys: The architecture's keys.
        config: What is known already.
        usual: The number, where no key says it.

    Raises:
        CheckpointError: If the list is of other layers, or the number is negative.
    """
    name, layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = keys.raw(name, usual)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise CheckpointError(
                f"{keys.where}: {keys.architecture}.{name} has {len(pattern)} values for {layers} "
                "layers"
            )
        slides = [bool(value) for value in pattern]
    else:
        every = keys.integer(name, usual)
        if every < 0:
            raise CheckpointError(
                f"{keys.where}: {keys.architecture}.{name} must be 0 or more, got {every}"
            )
        slides = [every == 0 or (i + 1) % every != 0 for i in range(min(layers, 1 << 16))]
    names = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [names[slide] for slide in slides]}
