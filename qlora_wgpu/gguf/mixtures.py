"""Mixtures of experts in GGUF files, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.families.parts.moe import SparseMoeBlock
from qlora_wgpu.gguf.architecture import (
    BIAS,
    SIGMOID,
    Config,
    ModelKeys,
    Pair,
    check_scales,
    window_pattern,
)
from qlora_wgpu.gguf.families import check_granite, write_convolving
from qlora_wgpu.gguf.keys import Keys

# ---- keys ----------------------------------------------------------------------------------------


def counts(
    count: str, used: str = "num_experts_per_tok", size: str | None = None
) -> tuple[Pair, ...]:
    """How many experts there are and each token meets, and where a key says it, their size."""
    sizes = () if size is None else (Pair("expert_feed_forward_length", size),)
    return Pair("expert_count", count), Pair("expert_used_count", used), *sizes


_MIXTRAL = counts("num_local_experts")
COUNTS = counts("num_experts", size="moe_intermediate_size")
SHARED = "expert_shared_feed_forward_length"
WITH_SHARED = (*COUNTS, Pair(SHARED, "shared_expert_intermediate_size"))
ONE_SHARED = (Pair("expert_shared_count"), Pair(SHARED))
GRANITE_SHARED = Pair(SHARED, tell=lambda keys: keys.shared_size or None)


def _groups(keys: ModelKeys) -> int | None:
    """llama.cpp takes no such number of groups where all experts are chosen from."""
    scoring = keys.scoring
    return None if scoring.groups == scoring.top_groups else scoring.groups


def _top_groups(keys: ModelKeys) -> int | None:
    return None if _groups(keys) is None else keys.scoring.top_groups


CORRECTED = (
    *counts("n_routed_experts", size="moe_intermediate_size"),
    Pair("leading_dense_block_count", "first_k_dense_replace", 0),
    Pair("expert_shared_count", "n_shared_experts"),
    Pair(SHARED),
    Pair("expert_gating_func"),
    Pair("expert_weights_norm", "norm_topk_prob", False),
    Pair("expert_weights_scale", "routed_scaling_factor", 1.0),
    Pair("expert_group_count", tell=_groups),
    Pair("expert_group_used_count", tell=_top_groups),
)
"""Of the mixtures of DeepSeek-V3's kind, some experts of which are chosen with a correction."""


def by_softmax(*, normalized: bool | None, scaled: bool = False) -> Mapping[str, tuple[Any, ...]]:
    """The values that keys may have of weights that a softmax makes, as the model type has it."""
    allowed: dict[str, tuple[Any, ...]] = {"expert_gating_func": (0, 1)}
    if not scaled:
        allowed["expert_weights_scale"] = (0.0, 1.0)
    return allowed if normalized is None else {**allowed, "expert_weights_norm": (normalized,)}


def shared_size(count: str, size: str) -> Any:
    """The size of all shared experts together."""
    return (lambda config: config[count] * config[size],)


# ---- reading -------------------------------------------------------------------------------------


def read_llama(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Llama and what is computed as it is: Mistral, Mixtral, SmolLM."""
    window = keys.integer("attention.sliding_window", 0) or None
    if keys.integer("expert_count", 0):
        keys.refuse("expert_gating_func", 0, 1)
        keys.refuse("expert_weights_scale", 0.0, 1.0)
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
    """Granite's mixtures, with a shared MLP or without."""
    shared = keys.integer(SHARED, 0)
    if not shared:
        return {}
    return {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": shared,
    }


def read_corrected(keys: Keys, file: GGUFFile, config: Config, scoring: int = SIGMOID) -> Config:
    """The mixture of DeepSeek's kind."""
    keys.refuse("expert_gating_func", 0, scoring)
    groups = max(keys.integer("expert_group_count", 1), 1)
    top = max(keys.integer("expert_group_used_count", groups), 1)
    return {"n_group": groups, "topk_group": top}


def read_exaone_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """K-EXAONE, whose layers with a window alone know positions."""
    return {
        **read_corrected(keys, file, config),
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        **window_pattern(keys, config, 4),
    }


# ---- writing -------------------------------------------------------------------------------------


def check_every_layer(keys: ModelKeys, *, normalized: bool = True) -> None:
    """Refuses layers without experts, and weights that are summed otherwise."""
    if len(keys.mixtures) < len(keys.decoder.layers):
        raise keys.refuse("layers without experts beside others with them")
    if keys.experts.norm_topk_prob != normalized:
        says = str(not normalized).lower()
        does = "do not sum" if normalized else "sum"
        raise keys.refuse(f"experts whose weights {does} up to one (norm_topk_prob = {says})")


def check_mixture(keys: ModelKeys) -> None:
    """Qwen 3's and what is like it."""
    check_scales(keys)
    check_every_layer(keys)


def check_plain_mixture(keys: ModelKeys) -> None:
    """Qwen 2's, whose weights are those of all experts."""
    check_scales(keys)
    check_every_layer(keys, normalized=False)


def write_llama(keys: ModelKeys) -> None:
    """Llama, and Mixtral, whose experts are as wide as feed_forward_length says."""
    check_scales(keys)
    if keys.model_type == "mixtral":
        check_every_layer(keys)
        for pair in _MIXTRAL:
            pair.write(keys)


def check_gpt_oss(keys: ModelKeys) -> None:
    """gpt-oss, every layer of which has biases."""
    if not all(attention.qkv_bias and attention.o_bias for attention in keys.attentions):
        raise keys.refuse("attention without biases")
    check_mixture(keys)


def check_olmoe(keys: ModelKeys) -> None:
    """OLMoE, whose weights of experts are those of all."""
    sizes = keys.decoder.dimensions
    if sizes.num_key_value_heads != sizes.num_attention_heads:
        raise keys.refuse("fewer heads of keys than of queries")
    if any(attention.clip is not None for attention in keys.attentions):
        raise keys.refuse("clipped queries, keys and values")
    check_plain_mixture(keys)


def check_granite_moe(keys: ModelKeys) -> None:
    """Granite's, with a shared MLP or without."""
    check_granite(keys)
    check_every_layer(keys)


def check_hunyuan_moe(keys: ModelKeys) -> None:
    """Hunyuan's, with a shared expert of the same size."""
    check_mixture(keys)
    if len({mixture.num_experts_per_tok for mixture in keys.mixtures}) > 1:
        raise keys.refuse("layers of whose experts a token meets different numbers")


def check_ernie(keys: ModelKeys) -> None:
    """ERNIE 4.5's, in every layer from one on: llama.cpp loads no other order."""
    check_scales(keys)
    _check_after_dense(keys)
    _check_router(keys, sigmoid=False)


def write_lfm2_moe(keys: ModelKeys) -> None:
    """LFM2's, whose layers also convolve."""
    write_convolving(keys)
    _check_after_dense(keys)
    _check_router(keys, sigmoid=True)


def check_corrected(keys: ModelKeys) -> None:
    """Those of DeepSeek-V3's kind: GLM 4.5, EXAONE."""
    check_scales(keys)
    _check_after_dense(keys)
    if _groups(keys) is not None and not keys.scoring.pairs:
        raise keys.refuse("experts in groups that are ranked by the best of each")


def _check_after_dense(keys: ModelKeys) -> None:
    """Refuses layers without experts behind one that has them."""
    sparse = [isinstance(layer.mlp, SparseMoeBlock) for layer in keys.decoder.layers]
    if True not in sparse:
        raise keys.refuse("a model without experts")
    if not all(sparse[sparse.index(True) :]):
        raise keys.refuse("this order of layers with and without experts")


def _check_router(keys: ModelKeys, *, sigmoid: bool) -> None:
    """Refuses another choice of experts than the architecture's, of which no key tells."""
    scoring = keys.scoring
    if scoring.sigmoid != sigmoid or not scoring.normalized or scoring.groups > 1:
        raise keys.refuse("experts whose weights do not sum up to one, or in groups")
    if scoring.scale != 1.0:
        raise keys.refuse(f"a routed_scaling_factor of {scoring.scale:g}")
    assert keys.experts.choice is not None
    if keys.experts.choice.correction is None:
        raise keys.refuse("experts that are chosen without a correction")
