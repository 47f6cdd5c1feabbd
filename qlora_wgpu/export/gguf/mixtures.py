"""What a GGUF file says of experts."""

from __future__ import annotations

from qlora_wgpu.export.gguf.convolutions import convolving
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.export.gguf.scales import check_scales, granite_scales
from qlora_wgpu.families.parts.moe import Experts

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of expert_gating_func


def mixtral(keys: ModelKeys) -> None:
    """Mixtral, whose experts are as wide as feed_forward_length says."""
    check_scales(keys)
    _expert_counts(keys)


def qwen3_moe(keys: ModelKeys) -> None:
    """Qwen 3."""
    check_scales(keys)
    experts = _expert_counts(keys)
    keys.values["expert_feed_forward_length"] = experts.intermediate_size


def gpt_oss(keys: ModelKeys) -> None:
    """gpt-oss, every layer of which has biases."""
    if not all(attention.qkv_bias and attention.o_bias for attention in keys.attentions):
        raise keys.refuse("attention without biases")
    qwen3_moe(keys)


def olmoe(keys: ModelKeys) -> None:
    """OLMoE, whose weights of experts are those of all."""
    sizes = keys.decoder.dimensions
    if sizes.num_key_value_heads != sizes.num_attention_heads:
        raise keys.refuse("fewer heads of keys than of queries")
    if any(getattr(layer.attention, "clip", None) is not None for layer in keys.decoder.layers):
        raise keys.refuse("clipped queries, keys and values")
    check_scales(keys)
    _expert_counts(keys, normalized=False)


def qwen2_moe(keys: ModelKeys) -> None:
    """Qwen 1.5 and 2, with an expert that every token meets."""
    qwen_shared(keys, normalized=False)


def qwen_shared(keys: ModelKeys, *, normalized: bool = True) -> None:
    """With an expert that every token meets, by a gate."""
    check_scales(keys)
    experts = _expert_counts(keys, normalized=normalized)
    assert experts.shared is not None
    shared = experts.shared.mlp.dimensions.intermediate_size
    keys.values["expert_feed_forward_length"] = experts.intermediate_size
    keys.values["expert_shared_feed_forward_length"] = shared


def granite_moe(keys: ModelKeys) -> None:
    """Granite's, with an MLP that every token meets or without."""
    granite_scales(keys)
    experts = _expert_counts(keys)
    if experts.shared is not None:
        shared = experts.shared.mlp.dimensions.intermediate_size
        keys.values["expert_shared_feed_forward_length"] = shared


def _expert_counts(keys: ModelKeys, *, normalized: bool = True) -> Experts:
    mixtures = [layer.mlp for layer in keys.decoder.layers if isinstance(layer.mlp, Experts)]
    if len(mixtures) < len(keys.decoder.layers):
        raise keys.refuse("layers without experts beside others with them")
    if mixtures[0].norm_topk_prob != normalized:
        says = str(not normalized).lower()
        does = "do not sum" if normalized else "sum"
        raise keys.refuse(f"experts whose weights {does} up to one (norm_topk_prob = {says})")
    keys.values["expert_count"] = mixtures[0].num_experts
    keys.values["expert_used_count"] = mixtures[0].num_experts_per_tok
    return mixtures[0]


def hunyuan_moe(keys: ModelKeys) -> None:
    """Hunyuan's, with an expert of the same size that every token meets."""
    check_scales(keys)
    experts = _expert_counts(keys)
    if any(
        isinstance(layer.mlp, Experts)
        and layer.mlp.num_experts_per_tok != experts.num_experts_per_tok
        for layer in keys.decoder.layers
    ):
        raise keys.refuse("layers of whose experts a token meets different numbers")
    keys.values["expert_feed_forward_length"] = experts.intermediate_size
    _shared(keys, experts)


def ernie4_5_moe(keys: ModelKeys) -> None:
    """ERNIE 4.5's, in every layer from one on: llama.cpp loads no other order."""
    check_scales(keys)
    experts = _after_dense(keys)
    keys.values["interleave_moe_layer_step"] = 1
    _shared(keys, experts)
    _check_router(keys, experts, sigmoid=False)


def lfm2_moe(keys: ModelKeys) -> None:
    """LFM2's, whose layers also convolve."""
    check_scales(keys)
    convolving(keys)
    experts = _after_dense(keys)
    keys.values["expert_gating_func"] = _SIGMOID
    _check_router(keys, experts, sigmoid=True)


def corrected(keys: ModelKeys) -> None:
    """Those of DeepSeek-V3's kind: GLM 4.5, EXAONE."""
    check_scales(keys)
    experts = _after_dense(keys)
    _shared(keys, experts)
    tell_router(keys, experts)


def tell_router(keys: ModelKeys, experts: Experts) -> None:
    """Adds how experts are chosen and weighted, where there are keys for it.

    Raises:
        UnsupportedModelError: If llama.cpp ranks groups otherwise.
    """
    assert experts.choice is not None
    scoring = experts.choice.scoring
    keys.values |= {
        "expert_gating_func": _SIGMOID if scoring.sigmoid else _SOFTMAX,
        "expert_weights_norm": scoring.normalized,
        "expert_weights_scale": float(scoring.scale),
    }
    if scoring.groups == scoring.top_groups:
        return  # all experts are chosen from, and llama.cpp takes no such number of groups
    if not scoring.pairs:
        raise keys.refuse("experts in groups that are ranked by the best of each")
    keys.values["expert_group_count"] = scoring.groups
    keys.values["expert_group_used_count"] = scoring.top_groups


def _after_dense(keys: ModelKeys) -> Experts:
    """Adds the numbers of experts, and the first layers, which have none.

    Raises:
        UnsupportedModelError: If others have none, either.
    """
    sparse = [isinstance(layer.mlp, Experts) for layer in keys.decoder.layers]
    if True not in sparse:
        raise keys.refuse("a model without experts")
    lead = sparse.index(True)
    if not all(sparse[lead:]):
        raise keys.refuse("this order of layers with and without experts")
    experts = keys.decoder.layers[sparse.index(True)].mlp
    assert isinstance(experts, Experts)
    keys.values |= {
        "expert_count": experts.num_experts,
        "expert_used_count": experts.num_experts_per_tok,
        "expert_feed_forward_length": experts.intermediate_size,
        "leading_dense_block_count": lead,
    }
    return experts


def _shared(keys: ModelKeys, experts: Experts) -> None:
    """Adds the sizes of what every token meets."""
    size = experts.shared.mlp.dimensions.intermediate_size if experts.shared else 0
    keys.values["expert_shared_count"] = size // experts.intermediate_size
    keys.values["expert_shared_feed_forward_length"] = size


def _check_router(keys: ModelKeys, experts: Experts, *, sigmoid: bool) -> None:
    """Refuses another choice of experts than the architecture's, of which no key tells."""
    assert experts.choice is not None
    scoring = experts.choice.scoring
    if scoring.sigmoid != sigmoid or not scoring.normalized or scoring.groups > 1:
        raise keys.refuse("experts whose weights do not sum up to one, or in groups")
    if scoring.scale != 1.0:
        raise keys.refuse(f"a routed_scaling_factor of {scoring.scale:g}")
    if experts.choice.correction is None:
        raise keys.refuse("experts that are chosen without a correction")


def granite(keys: ModelKeys) -> None:
    """Granite 3 without experts, and Granite 4 with and without them."""
    if any(isinstance(layer.mlp, Experts) for layer in keys.decoder.layers):
        granite_moe(keys)
    else:
        granite_scales(keys)
