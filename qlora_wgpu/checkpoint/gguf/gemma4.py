"""Gemma 4 in GGUF files, whose layers differ in heads, keys and MLP."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.architecture import FACTORS, window_pattern
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys, shortest
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]
NAMES = (
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("layer_output_scale", "layer_scalar"),
    ("ffn_gate_inp", "router.proj"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
)
"""What its blocks' tensors are called in Hugging Face's files."""
_TABLE = "per_layer_token_embd"
OUTSIDE = (
    (_TABLE, "model.embed_tokens_per_layer"),
    ("per_layer_model_proj", "model.per_layer_model_projection"),
    ("per_layer_proj_norm", "model.per_layer_projection_norm"),
)
"""The same of tensors outside of blocks."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LARGE = 1e20  # by which a frequency is divided that does not turn
_USUAL = 0.25  # of the pairs turn


def gemma4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 4, text."""
    layers = config["num_hidden_layers"]
    types = window_pattern(keys, config, 6)["layer_types"]
    keys.refuse("attention.value_length", config["head_dim"])
    near_dim = keys.integer("attention.key_length_swa", config["head_dim"])
    keys.refuse("attention.value_length_swa", near_dim)
    keys.refuse("rope.dimension_count", config["head_dim"])
    keys.refuse("rope.dimension_count_swa", near_dim)
    if config.pop("rope_scaling", {}).get("rope_type") not in (None, "longrope", "llama3"):
        raise UnsupportedModelError(f"{keys.where}: rope.scaling is not computed for Gemma 4")
    heads = keys.each("attention.head_count_kv", layers)
    far_heads = _same(keys, heads, types, _FULL) or heads[0]
    near_heads = _same(keys, heads, types, _SLIDING) or far_heads
    shared = keys.integer("attention.shared_kv_layers", 0)
    table = f"{_TABLE}.weight"
    own = [i for i, kind in enumerate(types[: layers - shared]) if kind == _FULL]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "head_dim": near_dim,
        "num_key_value_heads": near_heads,
        "per_layer_config": {
            str(i): {"head_dim": config["head_dim"], "num_key_value_heads": far_heads}
            for i, kind in enumerate(types)
            if kind == _FULL
        },
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file for i in own),
        "num_kv_shared_layers": shared,
        **_feed_forward(keys, layers, shared),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {
            _FULL: _rotation(file, config["rope_theta"], config["head_dim"]),
            _SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
            },
        },
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": (
            file.tensor(table).place.shape[0] if table in file else config["vocab_size"]
        ),
        **_experts(keys),
    }


def _same(keys: Keys, heads: list[int], types: list[str], kind: str) -> int | None:
    """The heads of keys of all layers of a kind; None where there is none."""
    found = {count for count, own in zip(heads, types, strict=True) if own == kind}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.head_count_kv has several numbers for "
            f"layers of {kind}, which are not computed together"
        )
    return found.pop() if found else None


def _feed_forward(keys: Keys, layers: int, shared: int) -> Config:
    """The MLPs' size, and whether it is twice that where keys and values are shared."""
    sizes = keys.each("feed_forward_length", layers)
    wide = bool(shared) and sizes[-1] == 2 * sizes[0]
    expected = [sizes[0] * (2 if wide and i >= layers - shared else 1) for i in range(layers)]
    if sizes != expected:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.feed_forward_length has MLPs of sizes that are not "
            "computed together"
        )
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": wide}


def _rotation(file: GGUFFile, theta: float, head_dim: int) -> Config:
    """That of layers which see everything: the first pairs turn, the others are left."""
    factors = file.floats(FACTORS) if FACTORS in file else np.ones(head_dim // 2, np.float32)
    turned = int((factors < _LARGE).sum())
    factor = factors[0] if turned else np.float32(1)
    if len(factors) != head_dim // 2 or not (factors[:turned] == factor).all() or not factor > 0:
        raise CheckpointError(f"{file.path}: {FACTORS} is none that Gemma 4 has")
    # In between two shares, since a product with the share is rounded down to whole pairs.
    share = min((2 * turned + 0.5) / head_dim, 1.0)
    if int(_USUAL * head_dim // 2) == turned:
        share = _USUAL
    rotation = {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": share if turned else 0.0,
    }
    return rotation if factor == 1 else {**rotation, "factor": shortest(float(factor))}


def _experts(keys: Keys) -> Config:
    count = keys.integer("expert_count", 0)
    keys.refuse("expert_gating_func", 0, 1)
    if not count:
        keys.ignore("expert_used_count", "expert_feed_forward_length")
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }
