"""Mixtures of experts in GGUF files, both ways."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.families.parts.moe import SparseMoeBlock
from qlora_wgpu.gguf.architecture import (
    BIAS,
    SIGMOID,
    Config,
    Keys,
    ModelKeys,
    Pair,
    check_scales,
    window_pattern,
)

# ---- keys ----------------------------------------------------------------------------------------


def counts(
    count: str, used: str = "num_experts_per_tok", size: str | None = None
) -> tuple[Pair, ...]:
    """The number of experts, the number for each token, and if a key says it, their size."""
    sizes = () if size is None else (Pair("expert_feed_forward_length", size),)
    return Pair("expert_count", count), Pair("expert_used_count", used), *sizes


_MIXTRAL = counts("num_local_experts")
COUNTS = counts("num_experts", size="moe_intermediate_size")
SHARED = "expert_shared_feed_forward_length"
WITH_SHARED = (*COUNTS, Pair(SHARED, "shared_expert_intermediate_size"))
ONE_SHARED = (Pair("expert_shared_count"), Pair(SHARED))
GRANITE_SHARED = Pair(SHARED, value=lambda keys: keys.shared_size or None)


def _groups(keys: ModelKeys) -> int | None:
    """None if experts are chosen from all groups: llama.cpp refuses the key then."""
    scoring = keys.scoring
    return None if scoring.groups == scoring.top_groups else scoring.groups


def _top_groups(keys: ModelKeys) -> int | None:
    return None if _groups(keys) is None else keys.scoring.top_groups


DEEPSEEK = (
    *counts("n_routed_experts", size="moe_intermediate_size"),
    Pair("leading_dense_block_count", "first_k_dense_replace", 0),
    Pair("expert_shared_count", "n_shared_experts"),
    Pair(SHARED),
    Pair("expert_gating_func"),
    Pair("expert_weights_norm", "norm_topk_prob", False),
    Pair("expert_weights_scale", "routed_scaling_factor", 1.0),
    Pair("expert_group_count", value=_groups),
    Pair("expert_group_used_count", value=_top_groups),
)
"""Mixtures like DeepSeek-V3's, which choose experts by scores plus a correction bias."""


NEMOTRON = (
    *counts("n_routed_experts", size="moe_intermediate_size"),
    Pair("expert_shared_count", "n_shared_experts", 1, value=lambda keys: 1),
    Pair(SHARED, "moe_shared_expert_intermediate_size"),
    *DEEPSEEK[-4:],
)
"""The same with one shared MLP of its own size, and sigmoids that no key names."""


def by_softmax(*, normalized: bool | None, scaled: bool = False) -> Mapping[str, tuple[Any, ...]]:
    """The values that keys may have if experts are scored by a softmax."""
    allowed: dict[str, tuple[Any, ...]] = {"expert_gating_func": (0, 1)}
    if not scaled:
        allowed["expert_weights_scale"] = (0.0, 1.0)
    return allowed if normalized is None else {**allowed, "expert_weights_norm": (normalized,)}


def shared_size(count: str, size: str) -> Any:
    """The total size of the shared experts."""
    return (lambda config: config[count] * config[size],)


# ---- reading -------------------------------------------------------------------------------------


def read_llama(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Llama, and families that are computed as Llama: Mistral, Mixtral, SmolLM."""
    window = keys.integer("attention.sliding_window", 0) or None
    if keys.integer("expert_count", 0):
        keys.require("expert_gating_func", 0, 1)
        keys.require("expert_weights_scale", 0.0, 1.0)
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            **{pair.name: pair.read(keys, config) for pair in _MIXTRAL},
            "sliding_window": window,
        }
    if window is not None:
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {"attention_bias": BIAS in file, "mlp_bias": "blk.0.ffn_up.bias" in file}


def read_granite_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Granite's mixtures, with or without a shared MLP."""
    shared = keys.integer(SHARED, 0)
    if not shared:
        return {}
    return {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": shared,
    }


def read_groups(keys: Keys, file: GGUFFile, config: Config, scoring: int = SIGMOID) -> Config:
    """Groups of experts, as in DeepSeek's mixtures."""
    keys.require("expert_gating_func", 0, scoring)
    groups = max(keys.integer("expert_group_count", 1), 1)
    top = max(keys.integer("expert_group_used_count", groups), 1)
    return {"n_group": groups, "topk_group": top}


def read_exaone_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """K-EXAONE, where only layers with a window are rotated."""
    return {
        **read_groups(keys, file, config),
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        **window_pattern(keys, config, 4),
    }


# ---- writing -------------------------------------------------------------------------------------


def check_every_layer(keys: ModelKeys, *, normalized: bool = True) -> None:
    """Refuses layers without experts, and another normalization of their weights."""
    if len(keys.mixtures) < len(keys.decoder.layers):
        raise keys.unsupported("layers with experts next to layers without")
    if keys.experts.norm_topk_prob != normalized:
        value = str(not normalized).lower()
        do_sum = "do not sum" if normalized else "sum"
        raise keys.unsupported(f"expert weights that {do_sum} to one (norm_topk_prob = {value})")


def write_mixtral(keys: ModelKeys) -> None:
    """Adds Mixtral's experts, whose size is feed_forward_length."""
    if keys.model_type == "mixtral":
        check_every_layer(keys)
        for pair in _MIXTRAL:
            pair.write(keys)


def check_biased_attention(keys: ModelKeys) -> None:
    """gpt-oss, where every layer has biases."""
    if not all(attention.qkv_bias and attention.o_bias for attention in keys.attentions):
        raise keys.unsupported("attention without biases")


def check_olmoe(keys: ModelKeys) -> None:
    """OLMoE, which has neither grouped-query attention nor clipping here."""
    sizes = keys.decoder.dimensions
    if sizes.num_key_value_heads != sizes.num_attention_heads:
        raise keys.unsupported("fewer key heads than query heads")
    if any(attention.clip is not None for attention in keys.attentions):
        raise keys.unsupported("clipped queries, keys and values")


def check_one_top_k(keys: ModelKeys) -> None:
    """Hunyuan, where every layer has the same number of experts per token."""
    if len({mixture.num_experts_per_tok for mixture in keys.mixtures}) > 1:
        raise keys.unsupported("numbers of experts per token that differ between layers")


def check_after_dense(keys: ModelKeys) -> None:
    """Refuses dense layers after the first one with experts."""
    sparse = [isinstance(layer.mlp, SparseMoeBlock) for layer in keys.decoder.layers]
    if True not in sparse:
        raise keys.unsupported("a model without experts")
    if not all(sparse[sparse.index(True) :]):
        raise keys.unsupported("this order of layers with and without experts")


def check_groups(keys: ModelKeys) -> None:
    """Refuses groups of experts that are not ranked as DeepSeek-V3's."""
    if _groups(keys) is not None and not keys.scoring.pairs:
        raise keys.unsupported("groups of experts that are ranked by their best expert")


def check_router(keys: ModelKeys, *, sigmoid: bool) -> None:
    """Refuses another router than the architecture's, which no key describes."""
    scoring = keys.scoring
    if scoring.sigmoid != sigmoid or not scoring.normalized or scoring.groups > 1:
        raise keys.unsupported("expert weights that do not sum to one, or groups of experts")
    if scoring.scale != 1.0:
        raise keys.unsupported(f"a routed_scaling_factor of {scoring.scale:g}")
    assert keys.experts.choice is not None
    if keys.experts.choice.correction is None:
        raise keys.unsupported("experts that are chosen without a correction bias")


def check_afmoe(keys: ModelKeys) -> None:
    """Trinity, where every fourth layer has full attention and embeddings are always scaled."""
    check_scales(keys, embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size))
    if any((a.window is None) != ((i + 1) % 4 == 0) for i, a in enumerate(keys.attentions)):
        raise keys.unsupported("full attention in other layers than every fourth")


EVERY_LAYER = (check_scales, check_every_layer)
UNNORMALIZED = (check_scales, partial(check_every_layer, normalized=False))
AFTER_DENSE = (check_scales, check_after_dense, check_groups)
"""Checks of mixtures in all layers, with weights that sum to one or not, and of DeepSeek-V3's."""
