"""Mixtures of experts of llama.cpp, whose keys tell less than config.json does."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys

Config = dict[str, Any]
SHARED_NAMES = (
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
)
"""What tensors of the expert that every token meets are called in Hugging Face's files."""


def refuse_other_weights(keys: Keys, *, normalized: bool) -> None:
    """Refuses weights of experts that are no softmax's, which the model type fixes."""
    keys.refuse("expert_gating_func", 0, 1)
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", normalized)


def olmoe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """OLMoE, whose queries, keys and values are not clipped."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    refuse_other_weights(keys, normalized=False)
    keys.refuse("attention.clamp_kqv", 0.0)
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": False,
    }


def qwen2_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen 1.5 and 2 as mixtures, without windows."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    refuse_other_weights(keys, normalized=False)
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": "blk.0.attn_q.bias" in file,
        "use_sliding_window": False,
    }


def granite_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Granite's mixtures, without an MLP that every token meets."""
    whole_heads(keys, config)
    refuse_other_weights(keys, normalized=True)
    keys.refuse("expert_shared_feed_forward_length", 0)
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "attention_bias": False,
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }
