"""What a GGUF file says of experts."""

from __future__ import annotations

from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.export.gguf.scales import check_scales, granite_scales
from qlora_wgpu.families.moe import Experts


def mixtral(keys: ModelKeys) -> None:
    """Mixtral, whose experts are as wide as feed_forward_length says."""
    check_scales(keys)
    _expert_counts(keys)


def qwen3_moe(keys: ModelKeys) -> None:
    """Qwen 3, and gpt-oss."""
    check_scales(keys)
    experts = _expert_counts(keys)
    keys.values["expert_feed_forward_length"] = experts.intermediate_size


def olmoe(keys: ModelKeys) -> None:
    """OLMoE, whose weights of experts are those of all."""
    sizes = keys.decoder.dimensions
    if sizes.num_key_value_heads != sizes.num_attention_heads:
        raise keys.refuse("fewer heads of keys than of queries")
    check_scales(keys)
    _expert_counts(keys, normalized=False)


def qwen2_moe(keys: ModelKeys) -> None:
    """Qwen 1.5 and 2, with an expert that every token meets."""
    check_scales(keys)
    experts = _expert_counts(keys, normalized=False)
    assert experts.shared is not None
    shared = experts.shared.mlp.dimensions.intermediate_size
    keys.values["expert_feed_forward_length"] = experts.intermediate_size
    keys.values["expert_shared_feed_forward_length"] = shared


def granite_moe(keys: ModelKeys) -> None:
    """Granite's."""
    granite_scales(keys)
    _expert_counts(keys)


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


def granite(keys: ModelKeys) -> None:
    """Granite without experts."""
    if any(isinstance(layer.mlp, Experts) for layer in keys.decoder.layers):
        raise keys.refuse("experts")
    granite_scales(keys)
