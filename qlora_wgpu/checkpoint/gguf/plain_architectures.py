"""Llama, Qwen, Phi, Granite and others in GGUF files, by the keys that each has of its own."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys

Config = dict[str, Any]


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
