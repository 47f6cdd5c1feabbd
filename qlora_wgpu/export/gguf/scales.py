"""The factors that a model multiplies by, where llama.cpp's architecture has others."""

from __future__ import annotations

import math
from typing import Any

from qlora_wgpu.export.gguf.model_keys import ModelKeys

_SAME = 1e-5  # relative: files have float32


def check_scales(keys: ModelKeys, **told: float | None) -> None:
    """Refuses factors that are neither usual nor told by a key of the architecture."""
    decoder, head_dim = keys.decoder, keys.decoder.dimensions.head_dim
    usual: dict[str, tuple[Any, Any]] = {
        "embedding_scale": (decoder.embedding_scale, 1.0),
        "residual_scale": (decoder.layers[0].residual_scale, 1.0),
        "logit_scale": (decoder.logit_scale, 1.0),
        "final softcap": (decoder.logit_softcap, None),
    }
    for attention in keys.attentions:
        usual["score scale"] = (attention.scale or head_dim**-0.5, head_dim**-0.5)
        usual["score softcap"] = (attention.softcap, None)
    for name, (value, expected) in usual.items():
        expected = told.get(name.replace(" ", "_"), expected)
        if value is None or expected is None:
            is_same = value is expected
        else:
            is_same = math.isclose(value, expected, rel_tol=_SAME)
        if not is_same:
            raise keys.refuse(f"a {name.replace('_', ' ')} of {value:.6g}")


def granite_scales(keys: ModelKeys) -> None:
    """Tells Granite's factors, each of which has a key."""
    decoder, attention = keys.decoder, keys.attentions[0]
    scale = attention.scale or decoder.dimensions.head_dim**-0.5
    keys.values |= {
        "attention.scale": float(scale),
        "embedding_scale": float(decoder.embedding_scale),
        "residual_scale": float(decoder.layers[0].residual_scale),
        "logit_scale": 1.0 / decoder.logit_scale,
    }
    check_scales(
        keys,
        embedding_scale=decoder.embedding_scale,
        residual_scale=decoder.layers[0].residual_scale,
        logit_scale=decoder.logit_scale,
        score_scale=scale,
    )
