"""Mixtures of experts and latent attention of llama.cpp, whose keys tell less than config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.architecture import (
    Change,
    FloatArray,
    Placement,
    usual_scale,
    whole_heads,
    window_pattern,
)
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys, shortest
from qlora_wgpu.checkpoint.gguf.plain_architectures import convolving
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]
SHARED_NAMES = (
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
)
"""What tensors of a shared expert are called in Hugging Face's files."""


# ---- mixtures ------------------------------------------------------------------------------------

_SIGMOID = 2  # of expert_gating_func
SPARE = "nextn_predict_layers"
"""Layers at the end for multi-token prediction, which take no part in the logits."""


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
    """Granite's mixtures, with a shared MLP or without."""
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
    """The mixture of DeepSeek's kind."""
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


# ---- latent attention ----------------------------------------------------------------------------

NAMES = (
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
)
"""What its tensors are called in Hugging Face's files, the halves of kv_b_proj by themselves."""
_K_B, _V_B = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
_SOFTMAX, _SIGMOID_CODE = 1, 2
_LOG_SHARE = 0.1
# Files of GLM-4.7-Flash that do not tell how its experts are scored: layers and vocabulary.
_GLM = ((47, 48), 154_880)


def latent(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """DeepSeek V2 where experts are scored by a softmax, V3 where they are by sigmoids."""
    keys.ignore("attention.head_count_kv")  # one of the latent vector, or each head's
    rope_dim, kv_rank = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    length, v_length = (keys.integer(f"attention.{name}_length") for name in ("key", "value"))
    head_dim = keys.integer("attention.key_length_mla", 0) or length
    keys.refuse("attention.temperature_scale", 0.0)
    sizes = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": head_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.integer("attention.value_length_mla", 0) or v_length,
        "rope_interleave": True,
        "rope_parameters": _rotation(keys, config),
    }
    config |= sizes
    is_glm = config["num_hidden_layers"] in _GLM[0] and config["vocab_size"] == _GLM[1]
    scoring = keys.integer("expert_gating_func", 0) or (_SIGMOID_CODE if is_glm else _SOFTMAX)
    if scoring == _SIGMOID_CODE:
        return {**sizes, **corrected(keys, config)}
    refuse_other_weights(keys, normalized=False, scaled=True)
    more = corrected(keys, config, scoring=_SOFTMAX)
    if more["n_group"] > 1:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.expert_group_count = {more['n_group']} is not "
            "computed for experts that a softmax scores"
        )
    return {
        **sizes,
        **more,
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


def joined(found: dict[str, Placement], file: GGUFFile, config: Config) -> None:
    """Makes kv_b_proj of its two halves, the first of which is stored head by head, transposed."""
    heads = config["num_attention_heads"]
    for name in [name for name in found if name.endswith(_K_B)]:
        at = name.removesuffix(_K_B)
        k, v = found.pop(name), found.pop(at + _V_B, None)
        expected = (heads, config["kv_lora_rank"], config["qk_nope_head_dim"])
        if v is None or k.shape != expected or v.shape != (heads, config["v_head_dim"], k.shape[1]):
            raise CheckpointError(
                f"{file.path}: {k.stored} has shape {k.shape}, and attn_v_b "
                f"{None if v is None else v.shape}, where the keys tell {expected}"
            )
        shape = heads * (k.shape[2] + v.shape[1]), k.shape[1]
        found[f"{at}self_attn.kv_b_proj.weight"] = Placement(
            k.stored, shape, change=_halves(k, v, heads)
        )


def _halves(k: Placement, v: Placement, heads: int) -> Change:
    def make(parts: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1)

    def undo(array: FloatArray) -> Sequence[FloatArray]:
        keys, values = np.split(array.reshape(heads, -1, array.shape[1]), [k.shape[2]], axis=1)
        return [np.ascontiguousarray(keys.swapaxes(1, 2)), values]

    return Change((k, v), make, undo)
