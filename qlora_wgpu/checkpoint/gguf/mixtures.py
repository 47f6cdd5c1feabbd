"""Mixtures of experts of llama.cpp, whose keys tell less than config.json does."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.more_architectures import convolving
from qlora_wgpu.checkpoint.gguf.windows import window_pattern

Config = dict[str, Any]
SHARED_NAMES = (
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
)
"""What tensors of the expert that every token meets are called in Hugging Face's files."""


_SIGMOID = 2  # of expert_gating_func
SPARE = "nextn_predict_layers"
"""Layers at the end that guess further tokens, and take no part in the logits."""


def refuse_other_weights(keys: Keys, *, normalized: bool, scaled: bool = False) -> None:
    """Refuses weights of experts that are no softmax's, which the model type fixes."""
    keys.refuse("expert_gating_func", 0, 1)
    if not scaled:
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
    """Granite's mixtures, with an MLP that every token meets or without."""
    whole_heads(keys, config)
    refuse_other_weights(keys, normalized=True)
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    more: Config = {}
    if shared:
        more = {
            "model_type": "granitemoeshared",
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "shared_intermediate_size": shared,
        }
    return {
        **more,
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "attention_bias": False,
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def hunyuan_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Hunyuan's; the base of their rotation has its factor in it."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    refuse_other_weights(keys, normalized=True)
    size = keys.integer("expert_feed_forward_length")
    keys.refuse("expert_shared_feed_forward_length", size)
    keys.refuse("expert_shared_count", 1)
    return {
        "intermediate_size": size,
        "num_experts": keys.integer("expert_count"),
        "moe_topk": keys.integer("expert_used_count"),
        "attention_bias": False,
    }


def ernie4_5_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """ERNIE 4.5's."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    refuse_other_weights(keys, normalized=True)
    keys.refuse("rope.dimension_sections")
    size, count = keys.integer("expert_feed_forward_length"), keys.integer("expert_shared_count", 0)
    keys.refuse("expert_shared_feed_forward_length", size * count)
    return {
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": count,
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        "use_bias": False,
    }


def lfm2_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """LFM2's, whose layers also convolve."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    keys.refuse("expert_gating_func", 2)
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", True)
    return {
        **convolving(keys, config),
        **_counted(keys),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    }


def glm4_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """GLM 4.5 to 4.7; layers that predict several tokens are not among those that compute."""
    usual_scale(keys, config)
    keys.refuse("rope.dimension_sections")
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    return {
        **corrected(keys, config),
        "partial_rotary_factor": rotated / config["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in file,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file,
    }


def exaone_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """K-EXAONE, whose layers with a window alone know positions."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    keys.refuse("rope.freq_base_swa", config["rope_theta"])
    own = corrected(keys, config)
    return {
        **own,
        "num_experts": own["n_routed_experts"],
        "num_shared_experts": own["n_shared_experts"],
        "sliding_window": keys.integer("attention.sliding_window"),
        **window_pattern(keys, config, 4),
    }


def _counted(keys: Keys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def corrected(keys: Keys, config: Config, scoring: int = _SIGMOID) -> Config:
    """The mixture of DeepSeek's kind.

    Args:
        keys: The keys.
        config: What is known already.
        scoring: llama.cpp's number of what scores are.
    """
    keys.refuse("expert_gating_func", 0, scoring)
    groups = max(keys.integer("expert_group_count", 1), 1)
    counted, shared = _counted(keys), keys.integer("expert_shared_count")
    keys.refuse("expert_shared_feed_forward_length", shared * counted["moe_intermediate_size"])
    return {
        "num_hidden_layers": config["num_hidden_layers"] - keys.integer(SPARE, 0),
        "n_shared_experts": shared,
        "n_routed_experts": counted.pop("num_experts"),
        **counted,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": max(keys.integer("expert_group_used_count", groups), 1),
    }
