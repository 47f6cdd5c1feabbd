"""Latent attention in GGUF files, both ways: DeepSeek V2 and V3, and GLM 4.7."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.parts.latent_attention import EPS, LatentAttention
from qlora_wgpu.gguf.architecture import SIGMOID, SOFTMAX, Config, ModelKeys
from qlora_wgpu.gguf.keys import Keys, shortest
from qlora_wgpu.gguf.mixtures import by_softmax, check_corrected, read_corrected

_LOG_SHARE = 0.1  # by which llama.cpp's key has YaRN's share multiplied

# ---- reading -------------------------------------------------------------------------------------

# Files of GLM-4.7-Flash that do not tell how its experts are scored: layers and vocabulary.
_GLM = ((47, 48), 154_880)


def read_latent(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """DeepSeek V2 where experts are scored by a softmax, V3 where they are by sigmoids."""
    rope_dim, kv_rank = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    length, v_length = (keys.integer(f"attention.{name}_length") for name in ("key", "value"))
    head_dim = keys.integer("attention.key_length_mla", 0) or length
    sizes = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": head_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.integer("attention.value_length_mla", 0) or v_length,
        "rope_parameters": _rotation(keys, config),
    }
    is_glm = config["num_hidden_layers"] in _GLM[0] and config["vocab_size"] == _GLM[1]
    scoring = keys.integer("expert_gating_func", 0) or (SIGMOID if is_glm else SOFTMAX)
    if scoring == SIGMOID:
        return {**sizes, **read_corrected(keys, file, config)}
    for key, allowed in by_softmax(normalized=False, scaled=True).items():
        keys.refuse(key, *allowed)
    groups = read_corrected(keys, file, config, scoring=SOFTMAX)
    if groups["n_group"] > 1:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.expert_group_count = {groups['n_group']} is not "
            "computed for experts that a softmax scores"
        )
    return {
        **sizes,
        **groups,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy",
    }


def _rotation(keys: Keys, config: Config) -> Config:
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        share = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        if not share:
            raise UnsupportedModelError(
                f"{keys.where}: {keys.architecture}.rope.scaling.type = 'yarn' without a "
                "yarn_log_multiplier is not computed"
            )
        share = shortest(share / _LOG_SHARE)
        scaling = {**scaling, "mscale": share, "mscale_all_dim": share}
    return {**scaling, "rope_theta": config["rope_theta"]}


# ---- writing -------------------------------------------------------------------------------------

# Models of so many layers llama.cpp takes for those that have no latent vector of queries.
_LITE = (26, 27)
_LITE_BY_VOCABULARY = (48, 128_256)


def write_latent(keys: ModelKeys) -> None:
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
    check_corrected(keys)
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
