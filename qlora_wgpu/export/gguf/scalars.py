"""Numbers of layers that are tensors in Hugging Face's files and keys in llama.cpp's."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.architectures import XIELU
from qlora_wgpu.export.merged_weights import MergedWeights


def scalar_keys(merged: MergedWeights) -> dict[str, Any]:
    """The keys, an array with a number of each layer; none where a model has no such tensors.

    Args:
        merged: The weights, of which these are read at once.
    """
    layers, names = merged.architecture.num_layers, merged.architecture.norms
    keys: dict[str, Any] = {}
    for key, leaf in XIELU:
        own = [f"model.layers.{i}.{leaf}" for i in range(layers)]
        if own[0] in names:
            values = [merged.float32(merged.stored_name(name)).reshape(()) for name in own]
            keys[key] = np.array(values, np.float32)
    return keys
