"""Architectures of llama.cpp whose norms subtract the mean: StableLM, Command R, Nemotron, ..."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.windows import window_pattern
from qlora_wgpu.errors import UnsupportedModelError

Config = dict[str, Any]
EPS = 1e-5  # of OLMo 1, whose config.json does not say it


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
