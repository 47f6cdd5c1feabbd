"""What a GGUF file says of latent attention: DeepSeek V2 and V3, GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.export.gguf import mixtures
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.families.parts.latent_attention import EPS, LatentAttention

# Models of so many layers llama.cpp takes for those that have no latent vector of queries.
_LITE = (26, 27)
_LITE_BY_VOCABULARY = (48, 128_256)
_LOG_SHARE = 0.1  # by which llama.cpp's key has YaRN's share multiplied


def latent(keys: ModelKeys) -> None:
    """Adds all keys of it, rotations, too."""
    decoder = keys.decoder
    attention = decoder.layers[0].attention
    assert isinstance(attention, LatentAttention)
    layers, sizes = len(decoder.layers), decoder.dimensions
    if not attention.interleaved:
        raise keys.refuse("halves of heads that rotate together (rope_interleave = false)")
    is_lite = layers in _LITE or (layers, sizes.vocab_size) == _LITE_BY_VOCABULARY
    if is_lite and attention.q_rank is not None:
        raise keys.refuse(f"{layers} layers with a q_lora_rank")
    keys.values |= {
        "attention.head_count_kv": 1,  # of the latent vector, which all heads read
        "attention.key_length": attention.kv_rank + attention.rope_dim,
        "attention.value_length": attention.kv_rank,
        "attention.key_length_mla": attention.query_dim,
        "attention.value_length_mla": attention.v_dim,
        "attention.kv_lora_rank": attention.kv_rank,
        "attention.q_lora_rank": attention.q_rank or 0,
        "rope.dimension_count": attention.rope_dim,
        "rope.freq_base": float(attention.rope.theta),
    }
    _scaling(keys, attention)
    mixtures.corrected(keys)
    if decoder.norm.eps != EPS:
        keys.notes.append(
            f"llama.cpp adds {decoder.norm.eps:g}, the rms_norm_eps, under the roots of the latent "
            f"vectors' norms, too, where transformers adds {EPS:g}"
        )


def _scaling(keys: ModelKeys, attention: LatentAttention) -> None:
    """Adds YaRN, whose factor of cosines llama.cpp takes to be in the scores' scale."""
    given: Mapping[str, Any] = (
        keys.config.get("rope_parameters") or keys.config.get("rope_scaling") or {}
    )
    rope = attention.rope
    if rope.kind == "default":
        return
    if rope.kind != "yarn":
        raise keys.refuse(f"RoPE of type {rope.kind}")
    factor, share = float(given["factor"]), float(given.get("mscale_all_dim") or 0.0)
    if not share or factor <= 1 or not math.isclose(rope.factor, 1.0, rel_tol=1e-5):
        raise keys.refuse("YaRN whose mscale and mscale_all_dim differ")
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    if betas != (32, 1) or not given.get("truncate", True):
        raise keys.refuse("YaRN with a beta_fast, beta_slow or truncate of its own")
    length = given.get("original_max_position_embeddings") or keys.values["context_length"]
    keys.values |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(length),
        "rope.scaling.yarn_log_multiplier": _LOG_SHARE * share,
    }
