"""Further architectures of llama.cpp without experts."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.windows import window_pattern

Config = dict[str, Any]
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
