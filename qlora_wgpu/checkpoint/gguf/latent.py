"""Latent attention in GGUF files: DeepSeek V2 and V3, and what is made as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys, shortest
from qlora_wgpu.checkpoint.gguf.mixtures import corrected, refuse_other_weights
from qlora_wgpu.checkpoint.gguf.placement import Change, FloatArray, Placement
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]
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
_SOFTMAX, _SIGMOID = 1, 2
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
    scoring = keys.integer("expert_gating_func", 0) or (_SIGMOID if is_glm else _SOFTMAX)
    if scoring == _SIGMOID:
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
