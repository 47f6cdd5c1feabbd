"""Further architectures of llama.cpp, whose keys are those that all have."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys

Config = dict[str, Any]


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
    """EXAONE 4 without windows, which llama.cpp has in the model of 64 layers alone."""
    keys.refuse("rope.dimension_count", config["head_dim"])
    keys.refuse("attention.sliding_window", 0)
    keys.refuse("block_count", *(n for n in range(1, 1024) if n != 64))
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


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
