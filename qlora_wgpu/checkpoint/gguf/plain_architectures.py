"""Architectures of llama.cpp by the keys that each has of its own; most are without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.architecture import (
    Placement,
    inverse,
    usual_scale,
    whole_heads,
    window_pattern,
)
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]
EPS = 1e-5  # of OLMo 1, whose config.json does not say it


# ---- layer norms in place of RMS norms -----------------------------------------------------------


def stablelm(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """StableLM, of whose heads a part is rotated; without a second norm both halves are one."""
    parallel = "blk.0.ffn_norm.weight" not in file
    keys.refuse("use_parallel_residual", parallel)
    return {
        **_rotated_in_part(keys, config),
        "use_qkv_bias": "blk.0.attn_q.bias" in file,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file,
        "use_parallel_residual": parallel,
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    }


def starcoder2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """StarCoder 2, which has biases everywhere."""
    whole_heads(keys, config)
    dropouts = ("attention_dropout", "residual_dropout", "embedding_dropout")
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": None,
        **dict.fromkeys(dropouts, 0.0),
    }


def nemotron(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Nemotron 4 and Minitron, of whose heads a part is rotated."""
    return {
        **_rotated_in_part(keys, config),
        "hidden_act": "relu2",
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_up.bias" in file,
    }


def phi2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Phi 1, 1.5 and 2, which have biases everywhere."""
    if "blk.0.attn_qkv.weight" in file:
        raise UnsupportedModelError(
            f"{file.path} has q, k and v of Phi 2 in one tensor, as old files do: take a newer "
            "one, or the model's safetensors version"
        )
    return {**_rotated_in_part(keys, config), "hidden_act": "gelu_new", "qk_layernorm": False}


def olmo(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """OLMo 1, whose norms have no weights."""
    whole_heads(keys, config)
    keys.refuse("attention.layer_norm_epsilon", EPS, float(np.float32(EPS)))
    return {
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None,
        "attention_bias": False,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def cohere(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Command R."""
    whole_heads(keys, config)
    return {
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file,
        "attention_bias": False,
    }


def cohere2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Command R7B and Command A, one layer of four of which sees everything."""
    whole_heads(keys, config)
    keys.refuse("rope.freq_base_swa", config["rope_theta"])
    return {
        "logit_scale": keys.number("logit_scale"),
        "attention_bias": False,
        "sliding_window": keys.integer("attention.sliding_window"),
        **window_pattern(keys, config, 4),
    }


def _rotated_in_part(keys: Keys, config: Config) -> Config:
    usual_scale(keys, config)
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    return {"partial_rotary_factor": rotated / config["head_dim"]}


# ---- GPT-NeoX ------------------------------------------------------------------------------------

_QKV = "attention.query_key_value"
NAMES = (
    ("attn_qkv", _QKV),
    ("attn_output", "attention.dense"),
    ("ffn_up", "mlp.dense_h_to_4h"),
    ("ffn_down", "mlp.dense_4h_to_h"),
)
OUTSIDE = (("token_embd", "gpt_neox.embed_in"), ("output_norm", "gpt_neox.final_layer_norm"))


def gpt_neox(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """GPT-NeoX, whose activation no key tells: it is the one that llama.cpp computes."""
    usual_scale(keys, config)
    keys.refuse("attention.head_count_kv", config["num_attention_heads"])
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    return {
        "hidden_act": "gelu_new",
        "rotary_pct": rotated / config["head_dim"],
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file,
    }


def kind_order(heads: int, rows: int) -> npt.NDArray[np.int64]:
    """Which of Hugging Face's rows each of llama.cpp's is."""
    return np.arange(rows).reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1)


def by_head(found: dict[str, Placement], file: GGUFFile, config: Config) -> None:
    """Puts each head's query, key and value beside one another, as in Hugging Face's files."""
    heads, size = config["num_attention_heads"], config["head_dim"]
    order = inverse(kind_order(heads, 3 * heads * size))
    for name, placement in found.items():
        if _QKV not in name:
            continue
        if placement.shape[0] != len(order):
            raise CheckpointError(
                f"{file.path}: {placement.stored} has shape {placement.shape}, where {heads} heads "
                f"of {size} make {len(order)}"
            )
        found[name] = replace(placement, order=order)


# ---- Gemma ---------------------------------------------------------------------------------------


def gemma(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 1."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {"hidden_activation": "gelu_pytorch_tanh"}


def gemma2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 2, every other layer of which slides."""
    whole_heads(keys, config)
    keys.refuse("attention.sliding_window_pattern", 2)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scalar(keys, config, largest=46),
    }


def gemma3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 3, text."""
    whole_heads(keys, config)
    window, layers = keys.integer("attention.sliding_window", 0), window_pattern(keys, config, 6)
    if not window:  # no layer slides then, whatever the pattern
        layers = {"layer_types": ["full_attention"] * len(layers["layer_types"])}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window or 4096,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(keys, config, largest=62),
        **layers,
    }


def _query_scalar(keys: Keys, config: Config, largest: int) -> float:
    """The reciprocal square of the scores' scale, which files tell by their number of layers."""
    scale = keys.number("attention.scale", 0.0)
    if scale:
        return float(scale) ** -2
    heads: int = config["num_attention_heads"]
    of_largest: float = config["hidden_size"] / heads
    return of_largest if config["num_hidden_layers"] == largest else float(config["head_dim"])


# ---- Llama, Qwen and those near to them ----------------------------------------------------------


def llama(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Llama and what is computed as it is: Mistral, Mixtral, SmolLM."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    experts = keys.integer("expert_count", 0)
    window = keys.integer("attention.sliding_window", 0) or None
    if experts:
        keys.refuse("expert_gating_func", 0, 1)
        keys.refuse("expert_weights_scale", 0.0, 1.0)
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": experts,
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": window,
        }
    if window is not None:
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_up.bias" in file,
    }


def qwen(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen 2."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {}


def qwen3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen 3, of whose projections all may have biases."""
    return qwen(keys, file, config) | {"attention_bias": "blk.0.attn_q.bias" in file}


def qwen3_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen 3 as a mixture; every layer has experts."""
    keys.refuse("expert_gating_func", 0, 1)
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", True)
    keys.refuse("expert_shared_feed_forward_length", 0)
    return qwen3(keys, file, config) | {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def phi3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Phi 3 and 4, of whose heads a part may be rotated."""
    usual_scale(keys, config)
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    length = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "original_max_position_embeddings": length,
        "sliding_window": keys.integer("attention.sliding_window", 0) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def granite(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Granite 3 without experts."""
    whole_heads(keys, config)
    keys.refuse("expert_count", 0)
    return {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def smollm3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """SmolLM 3, every fourth layer of which knows no positions."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def gpt_oss(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Of YaRN's details, and of the experts' unit, no key tells: they are as published."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    keys.refuse("expert_gating_func", 0, 3)  # 3: softmax over the chosen
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", True, False)  # they sum to one whatever it says
    keys.refuse("attention.sliding_window_pattern", 2)
    scaling = config.get("rope_scaling")
    if scaling is None:
        rotation: Config = {"rope_parameters": {"rope_type": "default"}}
    else:
        is_yarn = scaling["rope_type"] == "yarn"
        rotation = {"rope_scaling": {**scaling, "truncate": False} if is_yarn else scaling}
    return {
        **rotation,
        "attention_bias": "blk.0.attn_q.bias" in file,
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
    }


# ---- others --------------------------------------------------------------------------------------

_EXAONE_WITH_WINDOWS = 64


def arcee(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Arcee's AFM: as Llama, with the square of a ReLU in place of a gate."""
    keys.refuse("rope.dimension_count", config["head_dim"])
    return {"hidden_act": "relu2", "attention_bias": "blk.0.attn_q.bias" in file}


def ernie4_5(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """ERNIE 4.5 without experts."""
    keys.refuse("rope.dimension_count", config["head_dim"])
    keys.refuse("rope.dimension_sections")
    return {"use_bias": "blk.0.attn_q.bias" in file}


def exaone4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """EXAONE 4; llama.cpp has windows in the model of 64 layers alone."""
    keys.refuse("rope.dimension_count", config["head_dim"])
    layers = config["num_hidden_layers"]
    if layers == _EXAONE_WITH_WINDOWS:
        keys.refuse("rope.freq_base_swa", config["rope_theta"])
        window = keys.integer("attention.sliding_window", 4096)
        return {"sliding_window": window, **window_pattern(keys, config, 4)}
    keys.refuse("attention.sliding_window", 0)
    return {"sliding_window": None, "layer_types": ["full_attention"] * layers}


def glm4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """GLM 4 of 2025, of whose heads a part is rotated."""
    keys.refuse("rope.dimension_sections")
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in file,
    }


def hunyuan(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Hunyuan without experts; the base of its rotation has its factor in it."""
    keys.refuse("rope.dimension_count", config["head_dim"])
    return {"attention_bias": False}


def seed_oss(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Seed-OSS, whose queries, keys and values may have biases."""
    keys.refuse("rope.dimension_count", config["head_dim"])
    bias = "blk.0.attn_q.bias" in file
    dropouts = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    return {"attention_bias": bias, "attention_out_bias": False, "mlp_bias": False, **dropouts}


def olmo2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """OLMo 2; with a window OLMo 3, whose layers that slide are rotated without scaling."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    window = keys.integer("attention.sliding_window", 0)
    if not window:
        return {}
    theta = config["rope_theta"]
    keys.refuse("rope.freq_base_swa", theta)
    far = {"rope_type": "default", **config.pop("rope_scaling", {})}
    factor = keys.number("rope.scaling.attn_factor", None)
    if factor is not None:  # which converters take from config.json as it is
        far["attention_factor"] = factor
    near = {"rope_type": "default", "rope_theta": theta}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {**far, "rope_theta": theta},
            "sliding_attention": near,
        },
        "sliding_window": window,
        "attention_bias": False,
        **window_pattern(keys, config, 4),
    }


def mistral3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Ministral 3, whose queries grow with their position."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    keys.refuse("expert_count", 0)
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        share = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        if share:
            scaling |= {"mscale": 1.0, "mscale_all_dim": share}
    return {
        "rope_parameters": {
            "original_max_position_embeddings": config["max_position_embeddings"],
            **scaling,
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
        },
        "sliding_window": None,
    }


def apertus(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Apertus, the scalars of whose activation are keys."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    return {
        "rope_parameters": {**scaling, "rope_theta": config["rope_theta"]},
        "hidden_act": "xielu",
        "attention_bias": "blk.0.attn_q.bias" in file,
    }


def lfm2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """LFM2: layers without heads of keys convolve."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {"block_auto_adjust_ff_dim": False, **convolving(keys, config)}


def convolving(keys: Keys, config: Config) -> Config:
    """Which layers convolve, and over how many tokens."""
    heads = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": False,
    }
