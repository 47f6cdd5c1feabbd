"""What a GGUF file says of mixtures, latent attention, delta nets, convolutions and Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.architecture import FACTORS
from qlora_wgpu.export.gguf.model_keys import ModelKeys, check_scales, granite_scales
from qlora_wgpu.families.gemma4_text import FULL, ROPES, SLIDING
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.latent_attention import EPS, LatentAttention
from qlora_wgpu.families.parts.mixers import GatedDeltaNet, ShortConv
from qlora_wgpu.families.parts.mlp import GatedMLP
from qlora_wgpu.families.parts.moe import SparseMoeBlock
from qlora_wgpu.families.parts.shared_kv import SharingDecoder, SharingLayer

# ---- convolutions --------------------------------------------------------------------------------


def convolving(keys: ModelKeys) -> None:
    """Which layers convolve, over how many tokens."""
    halves = [layer.attention for layer in keys.decoder.layers]
    convolutions = [half for half in halves if isinstance(half, ShortConv)]
    if not convolutions:
        raise keys.refuse("layers that all attend")
    if convolutions[0].taps < 2:
        raise keys.refuse("a convolution of one token")
    heads = keys.decoder.dimensions.num_key_value_heads
    counts = [0 if isinstance(half, ShortConv) else heads for half in halves]
    keys.values["attention.head_count_kv"] = np.array(counts, np.uint32)
    keys.values["shortconv.l_cache"] = convolutions[0].taps


# ---- mixtures ------------------------------------------------------------------------------------

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
    """Qwen 1.5 and 2, with a shared expert."""
    qwen_shared(keys, normalized=False)


def qwen_shared(keys: ModelKeys, *, normalized: bool = True) -> None:
    """With a shared expert, which has a gate."""
    check_scales(keys)
    experts = _expert_counts(keys, normalized=normalized)
    assert experts.shared is not None
    shared = experts.shared.mlp.dimensions.intermediate_size
    keys.values["expert_feed_forward_length"] = experts.intermediate_size
    keys.values["expert_shared_feed_forward_length"] = shared


def granite_moe(keys: ModelKeys) -> None:
    """Granite's, with a shared MLP or without."""
    granite_scales(keys)
    experts = _expert_counts(keys)
    if experts.shared is not None:
        shared = experts.shared.mlp.dimensions.intermediate_size
        keys.values["expert_shared_feed_forward_length"] = shared


def _expert_counts(keys: ModelKeys, *, normalized: bool = True) -> SparseMoeBlock:
    mixtures = [layer.mlp for layer in keys.decoder.layers if isinstance(layer.mlp, SparseMoeBlock)]
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
    """Hunyuan's, with a shared expert of the same size."""
    check_scales(keys)
    experts = _expert_counts(keys)
    if any(
        isinstance(layer.mlp, SparseMoeBlock)
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


def tell_router(keys: ModelKeys, experts: SparseMoeBlock) -> None:
    """Adds how experts are chosen and weighted, where there are keys for it."""
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


def _after_dense(keys: ModelKeys) -> SparseMoeBlock:
    """Adds the numbers of experts, and the first layers, which have none."""
    sparse = [isinstance(layer.mlp, SparseMoeBlock) for layer in keys.decoder.layers]
    if True not in sparse:
        raise keys.refuse("a model without experts")
    lead = sparse.index(True)
    if not all(sparse[lead:]):
        raise keys.refuse("this order of layers with and without experts")
    experts = keys.decoder.layers[sparse.index(True)].mlp
    assert isinstance(experts, SparseMoeBlock)
    keys.values |= {
        "expert_count": experts.num_experts,
        "expert_used_count": experts.num_experts_per_tok,
        "expert_feed_forward_length": experts.intermediate_size,
        "leading_dense_block_count": lead,
    }
    return experts


def _shared(keys: ModelKeys, experts: SparseMoeBlock) -> None:
    """Adds the number and the size of shared experts."""
    size = experts.shared.mlp.dimensions.intermediate_size if experts.shared else 0
    keys.values["expert_shared_count"] = size // experts.intermediate_size
    keys.values["expert_shared_feed_forward_length"] = size


def _check_router(keys: ModelKeys, experts: SparseMoeBlock, *, sigmoid: bool) -> None:
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
    if any(isinstance(layer.mlp, SparseMoeBlock) for layer in keys.decoder.layers):
        granite_moe(keys)
    else:
        granite_scales(keys)


# ---- latent attention ----------------------------------------------------------------------------

# Models of so many layers llama.cpp takes for those that have no latent vector of queries.
_LITE = (26, 27)
_LITE_BY_VOCABULARY = (48, 128_256)
_LOG_SHARE = 0.1  # by which llama.cpp's key has YaRN's share multiplied


def latent(keys: ModelKeys) -> None:
    """Adds all keys of it, rotations, too."""
    decoder = keys.decoder
    attention = decoder.layers[0].attention
    assert isinstance(attention, LatentAttention)
    layers, sizes = len(decoder.layers), decoder.dimensions
    if not attention.interleaved:
        raise keys.refuse("halves of heads that rotate together (rope_interleave = false)")
    is_lite = layers in _LITE or (layers, sizes.vocab_size) == _LITE_BY_VOCABULARY
    if is_lite and attention.q_rank is not None:
        raise keys.refuse(f"{layers} layers with a q_lora_rank")
    keys.values |= {
        "attention.head_count_kv": 1,  # of the latent vector, which all heads read
        "attention.key_length": attention.kv_rank + attention.rope_dim,
        "attention.value_length": attention.kv_rank,
        "attention.key_length_mla": attention.query_dim,
        "attention.value_length_mla": attention.v_dim,
        "attention.kv_lora_rank": attention.kv_rank,
        "attention.q_lora_rank": attention.q_rank or 0,
        "rope.dimension_count": attention.rope_dim,
        "rope.freq_base": float(attention.rope.theta),
    }
    _scaling(keys, attention)
    corrected(keys)
    if decoder.norm.eps != EPS:
        keys.notes.append(
            f"llama.cpp adds {decoder.norm.eps:g}, the rms_norm_eps, under the roots of the latent "
            f"vectors' norms, too, where transformers adds {EPS:g}"
        )


def _scaling(keys: ModelKeys, attention: LatentAttention) -> None:
    """Adds YaRN, whose factor of cosines llama.cpp takes to be in the scores' scale."""
    given: Mapping[str, Any] = (
        keys.config.get("rope_parameters") or keys.config.get("rope_scaling") or {}
    )
    rope = attention.rope
    if rope.kind == "default":
        return
    if rope.kind != "yarn":
        raise keys.refuse(f"RoPE of type {rope.kind}")
    factor, share = float(given["factor"]), float(given.get("mscale_all_dim") or 0.0)
    if not share or factor <= 1 or not math.isclose(rope.factor, 1.0, rel_tol=1e-5):
        raise keys.refuse("YaRN whose mscale and mscale_all_dim differ")
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    if betas != (32, 1) or not given.get("truncate", True):
        raise keys.refuse("YaRN with a beta_fast, beta_slow or truncate of its own")
    length = given.get("original_max_position_embeddings") or keys.values["context_length"]
    keys.values |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(length),
        "rope.scaling.yarn_log_multiplier": _LOG_SHARE * share,
    }


# ---- delta nets ----------------------------------------------------------------------------------

_EPS = 1e-6  # of the norm of queries and keys, whatever config.json says
_SECTIONS = 4  # kinds of positions that llama.cpp has


def qwen3_next(keys: ModelKeys) -> None:
    """Qwen3-Next, every layer of which has experts."""
    _delta_nets(keys)
    qwen_shared(keys)


def qwen3_5(keys: ModelKeys) -> None:
    """Qwen 3.5 without experts."""
    _delta_nets(keys)
    check_scales(keys)
    _sections(keys)


def qwen3_5_moe(keys: ModelKeys) -> None:
    """Qwen 3.5 as a mixture."""
    _delta_nets(keys)
    qwen_shared(keys)
    _sections(keys)


def _delta_nets(keys: ModelKeys) -> None:
    """Adds which layers are such, and their sizes."""
    halves = [layer.attention for layer in keys.decoder.layers]
    nets = [half for half in halves if isinstance(half, GatedDeltaNet)]
    if not nets:
        raise keys.refuse("a model of delta nets without any")
    if keys.decoder.norm.eps != _EPS:
        raise keys.refuse(f"a rms_norm_eps of {keys.decoder.norm.eps:g} beside delta nets")
    heads, taps = nets[0].heads, nets[0].taps
    if heads.key_dim != heads.value_dim:
        raise keys.refuse(
            f"a linear_key_head_dim of {heads.key_dim} and a linear_value_head_dim of "
            f"{heads.value_dim}, which differ,"
        )
    keys.values |= {
        "ssm.conv_kernel": taps,
        "ssm.state_size": heads.key_dim,
        "ssm.group_count": heads.key_heads,
        "ssm.time_step_rank": heads.value_heads,
        "ssm.inner_size": heads.value_size,
        "attention.recurrent_layers": np.array([isinstance(h, GatedDeltaNet) for h in halves]),
        "full_attention_interval": int(keys.config.get("full_attention_interval") or 4),
    }


def _sections(keys: ModelKeys) -> None:
    """Adds how many pairs of a head turn by each kind of position, which a text has one of.

    Those for time, height and width take turns; a pair that is nobody's would not turn at all.
    """
    pairs = keys.values["rope.dimension_count"] // 2
    whole = [(pairs + 2 - i) // 3 for i in range(3)]
    told = (keys.config.get("rope_parameters") or {}).get("mrope_section")
    if isinstance(told, list) and sorted(told) == sorted(whole):
        whole = told
    keys.values["rope.dimension_sections"] = np.array([*whole, 0][:_SECTIONS], np.int32)


# ---- Gemma 4 -------------------------------------------------------------------------------------

_STILL = 1e30  # divides the frequency of a pair that does not turn


def gemma4(keys: ModelKeys) -> None:
    """Adds all keys of it, rotations and windows, too."""
    decoder = keys.decoder
    assert isinstance(decoder, SharingDecoder)
    layers = [layer for layer in decoder.layers if isinstance(layer, SharingLayer)]
    attentions = keys.attentions
    far = next(a for a in attentions if a.window is None)  # the last layer's at least
    near = next((a for a in attentions if a.window is not None), None)
    if near is None:
        raise keys.refuse("layers none of which has a window")
    near_dim = decoder.dimensions.head_dim
    ropes: Mapping[str, Any] = keys.config.get("rope_parameters") or ROPES
    keys.values |= {
        "feed_forward_length": _numbers([_width(layer) for layer in layers]),
        "attention.head_count_kv": _numbers([a.dimensions.num_key_value_heads for a in attentions]),
        "attention.key_length": far.dimensions.head_dim,
        "attention.value_length": far.dimensions.head_dim,
        "attention.key_length_swa": near_dim,
        "attention.value_length_swa": near_dim,
        "attention.shared_kv_layers": sum(a.shared for a in attentions),
        "attention.sliding_window": near.window,
        "attention.sliding_window_pattern": np.array([a.window is not None for a in attentions]),
        "embedding_length_per_layer_input": decoder.inputs.size if decoder.inputs else 0,
        "rope.dimension_count": far.dimensions.head_dim,
        "rope.dimension_count_swa": near_dim,
        "rope.freq_base": float(ropes[FULL]["rope_theta"]),
        "rope.freq_base_swa": float({**ROPES, **ropes}[SLIDING]["rope_theta"]),
    }
    _check_sources(keys, layers)
    if _divisors(near, keys.values["rope.freq_base_swa"]).max() != 1.0:
        raise keys.refuse("a scaled rotation of layers with a window")
    mixture = layers[0].mixture
    if mixture is not None:
        keys.values |= {
            "expert_count": mixture.num_experts,
            "expert_used_count": mixture.top_k,
            "expert_feed_forward_length": mixture.intermediate_size,
        }
    softcap = decoder.logit_softcap
    keys.values["final_logit_softcapping"] = float(softcap or 0.0)  # 30 where nothing is told
    check_scales(
        keys,
        embedding_scale=math.sqrt(decoder.dimensions.hidden_size),
        final_softcap=softcap,
        score_scale=1.0,
    )


def rotation_factors(keys: ModelKeys) -> dict[str, npt.NDArray[np.float32]]:
    """By what the frequencies of layers without a window are divided, of which some do not turn."""
    far = next(a for a in keys.attentions if a.window is None)
    return {FACTORS: _divisors(far, keys.values["rope.freq_base"])}


def _divisors(attention: Attention, theta: float) -> npt.NDArray[np.float32]:
    assert attention.rope is not None
    size = attention.rope.rotary_dim
    plain = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    turned = np.asarray(attention.rope.frequencies(1), np.float64)
    divisors = np.divide(plain, turned, out=np.full(len(plain), _STILL), where=turned > 0)
    rounded: npt.NDArray[np.float32] = np.round(divisors, 5).astype(np.float32)
    return rounded  # since both have been rounded before


def _check_sources(keys: ModelKeys, layers: list[SharingLayer]) -> None:
    """Refuses layers that share what llama.cpp takes from another one.

    It takes them of the last two layers that have their own: of the last where all is seen, and of
    the one before it where there is a window.
    """
    own = [layer.kind for layer in layers if isinstance(layer.attention, Attention)
           and not layer.attention.shared]  # fmt: skip
    last = {kind: i for i, kind in enumerate(own)}
    for layer in layers[len(own) :]:
        if len(own) < 2 or last[layer.kind] != len(own) - (1 if layer.kind == FULL else 2):
            raise keys.refuse("keys and values that are shared by layers in this order")


def _width(layer: SharingLayer) -> int:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp.dimensions.intermediate_size


def _numbers(values: list[int]) -> npt.NDArray[np.uint32] | int:
    """A number of each layer, or one where all are the same."""
    return values[0] if len(set(values)) == 1 else np.array(values, np.uint32)
