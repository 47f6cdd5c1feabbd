"""What a GGUF file says of layers that convolve in place of attending (LFM2)."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.families.parts.mixers import ShortConv


def convolving(keys: ModelKeys) -> None:
    """Which layers convolve, over how many tokens.

    Raises:
        UnsupportedModelError: If none does, of which llama.cpp knows no such model, or one is over
            one token, for whose state of nothing it finds no room.
    """
    halves = [layer.attention for layer in keys.decoder.layers]
    convolutions = [half for half in halves if isinstance(half, ShortConv)]
    if not convolutions:
        raise keys.refuse("layers that all attend")
    if convolutions[0].taps < 2:
        raise keys.refuse("a convolution of one token")
    heads = keys.decoder.dimensions.num_key_value_heads
    counts = [0 if isinstance(half, ShortConv) else heads for half in halves]
    keys.values["attention.head_count_kv"] = np.array(counts, np.uint32)
    keys.values["shortconv.l_cache"] = convolutions[0].taps
