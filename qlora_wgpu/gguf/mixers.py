"""Layers without ordinary attention in GGUF files: delta nets, convolutions, latent attention.

Both ways: delta nets are Qwen3-Next's and Qwen 3.5's, convolutions LFM2's, latent attention that of
DeepSeek V2 and V3 and GLM 4.7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.parts.latent_attention import EPS, LatentAttention
from qlora_wgpu.families.parts.mixers import GatedDeltaNet, ShortConv
from qlora_wgpu.gguf.architecture import (
    MTP_LAYERS,
    SIGMOID,
    SOFTMAX,
    Config,
    Keys,
    ModelKeys,
    Pair,
    check_scales,
    shortest,
)
from qlora_wgpu.gguf.mixtures import by_softmax, read_groups
from qlora_wgpu.gguf.rotation import write_yarn

# ---- delta nets ----------------------------------------------------------------------------------

DELTA_NETS = (
    Pair("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Pair("ssm.state_size", "linear_key_head_dim"),
    Pair("ssm.group_count", "linear_num_key_heads"),
    Pair("ssm.time_step_rank", "linear_num_value_heads"),
    Pair("ssm.inner_size"),
    Pair("attention.recurrent_layers"),
    Pair("full_attention_interval"),
)
_MAX_LAYERS = 65_536  # a file may claim any number of layers, which is refused later
_EPS = 1e-6  # of the norm of queries and keys, whatever config.json says


def read_delta_nets(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Which layers are delta nets, and the size of their values."""
    layers = config["num_hidden_layers"] - keys.integer(MTP_LAYERS, 0)
    values, size = config["linear_num_value_heads"], config["linear_key_head_dim"]
    inner, key_heads = keys.integer("ssm.inner_size"), config["linear_num_key_heads"]
    if inner != values * size:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.ssm.inner_size is {inner}, but time_step_rank and "
            f"state_size give {values} heads of {size}"
        )
    if key_heads < 1 or values % key_heads:
        raise CheckpointError(
            f"{file.path}: ssm.time_step_rank {values} is not a multiple of ssm.group_count "
            f"{key_heads}"
        )
    kinds = {True: "linear_attention", False: "full_attention"}
    types = [kinds[recurrent] for recurrent in _recurrent(keys, layers)]
    return {"layer_types": types, "linear_value_head_dim": size}


def _recurrent(keys: Keys, layers: int) -> list[bool]:
    """Which layers are delta nets: as a list says, or all but each n-th, by default the fourth."""
    listed = keys.raw("attention.recurrent_layers")
    every = keys.integer("full_attention_interval", 4)
    if listed is None:
        return [every < 1 or (i + 1) % every != 0 for i in range(min(layers, _MAX_LAYERS))]
    is_list = isinstance(listed, np.ndarray) and listed.dtype.kind in "biu"
    if not is_list or len(listed) < layers:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.attention.recurrent_layers must have a value for "
            f"each of the {layers} layers"
        )
    return [bool(recurrent) for recurrent in listed[:layers]]


def check_delta_nets(keys: ModelKeys) -> None:
    """Refuses another epsilon, and keys and values of different sizes."""
    if not any(isinstance(mixer, GatedDeltaNet) for mixer in keys.mixers):
        raise keys.unsupported("a model without any delta net")
    if keys.decoder.norm.eps != _EPS:
        raise keys.unsupported(f"a rms_norm_eps of {keys.decoder.norm.eps:g} with delta nets")
    heads = keys.delta_net.heads
    if heads.key_dim != heads.value_dim:
        raise keys.unsupported(
            f"a linear_key_head_dim of {heads.key_dim} that differs from linear_value_head_dim, "
            f"{heads.value_dim},"
        )
    check_scales(keys)


# ---- convolutions --------------------------------------------------------------------------------


def read_convolutions(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Which layers are convolutions: those without key heads."""
    heads = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    return {"layer_types": ["full_attention" if count else "conv" for count in heads]}


def write_convolutions(keys: ModelKeys) -> None:
    """Writes which layers are convolutions, as their number of key heads."""
    check_scales(keys)
    convolutions = [mixer for mixer in keys.mixers if isinstance(mixer, ShortConv)]
    if not convolutions:
        raise keys.unsupported("attention in every layer")
    if convolutions[0].taps < 2:
        raise keys.unsupported("a convolution of one token")
    heads = keys.decoder.dimensions.num_key_value_heads
    counts = [0 if isinstance(mixer, ShortConv) else heads for mixer in keys.mixers]
    keys.values["attention.head_count_kv"] = np.array(counts, np.uint32)


# ---- latent attention ----------------------------------------------------------------------------

_LOG_SHARE = 0.1  # llama.cpp's key has YaRN's mscale times this

# Files of GLM-4.7-Flash that do not say how experts are scored: layers and vocabulary.
_GLM = ((47, 48), 154_880)


def read_latent(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """DeepSeek V2 if experts are scored by a softmax, V3 if by sigmoids."""
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
        return {**sizes, **read_groups(keys, file, config)}
    for key, allowed in by_softmax(normalized=False, scaled=True).items():
        keys.require(key, *allowed)
    groups = read_groups(keys, file, config, scoring=SOFTMAX)
    if groups["n_group"] > 1:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.expert_group_count = {groups['n_group']} is not "
            "supported for experts that are scored by a softmax"
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
                f"{keys.where}: {keys.architecture}.rope.scaling.type = 'yarn' is not supported "
                "without a yarn_log_multiplier"
            )
        share = shortest(share / _LOG_SHARE)
        scaling = {**scaling, "mscale": share, "mscale_all_dim": share}
    return {**scaling, "rope_theta": config["rope_theta"]}


# llama.cpp assumes that models with these numbers of layers have no latent vector of queries.
_LITE = (26, 27)
_LITE_BY_VOCABULARY = (48, 128_256)


def write_latent(keys: ModelKeys) -> None:
    """Adds all keys of latent attention and its rotation."""
    decoder = keys.decoder
    attention = decoder.layers[0].attention
    assert isinstance(attention, LatentAttention)
    layers, sizes = len(decoder.layers), decoder.dimensions
    if not attention.interleaved:
        raise keys.unsupported("RoPE on halves of heads (rope_interleave = false)")
    is_lite = layers in _LITE or (layers, sizes.vocab_size) == _LITE_BY_VOCABULARY
    if is_lite and attention.q_rank is not None:
        raise keys.unsupported(f"{layers} layers with a q_lora_rank")
    keys.values |= {
        "attention.head_count_kv": 1,  # the latent vector's, which all heads read
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
    if decoder.norm.eps != EPS:
        keys.notes.append(
            f"llama.cpp uses rms_norm_eps, {decoder.norm.eps:g}, in the norms of the latent "
            f"vectors too, where transformers uses {EPS:g}"
        )


def _scaling(keys: ModelKeys, attention: LatentAttention) -> None:
    """Adds YaRN, whose factor of cosines llama.cpp expects in the scale of the scores."""
    given: Mapping[str, Any] = (
        keys.config.get("rope_parameters") or keys.config.get("rope_scaling") or {}
    )
    rope = attention.rope
    if rope.kind == "default":
        return
    if rope.kind != "yarn":
        raise keys.unsupported(f"RoPE of type {rope.kind}")
    factor, share = float(given["factor"]), float(given.get("mscale_all_dim") or 0.0)
    if not share or factor <= 1 or not math.isclose(rope.factor, 1.0, rel_tol=1e-5):
        raise keys.unsupported("YaRN whose mscale and mscale_all_dim differ")
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    if betas != (32, 1) or not given.get("truncate", True):
        raise keys.unsupported("YaRN with a non-default beta_fast, beta_slow or truncate")
    write_yarn(keys, given, keys.values["context_length"])
    keys.values["rope.scaling.yarn_log_multiplier"] = _LOG_SHARE * share
