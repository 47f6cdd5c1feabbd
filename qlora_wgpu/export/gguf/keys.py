"""The keys by which a GGUF file tells llama.cpp what to compute, made of a decoder's parts.

What llama.cpp would compute otherwise is refused, since nothing would tell of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.export.gguf.rope import rope_keys
from qlora_wgpu.export.gguf.windows import window_keys
from qlora_wgpu.families.decoder import Decoder
from qlora_wgpu.families.moe import Experts
from qlora_wgpu.families.norm import LayerNorm
from qlora_wgpu.ops.clamped_glu import ClampedGLU

_SAME = 1e-5  # relative: files have float32


def model_keys(
    model_type: str, config: Mapping[str, Any], decoder: Decoder, llama_cpp: LlamaCpp
) -> ModelKeys:
    """What a file says of a model.

    Args:
        model_type: config.json's name of it.
        config: config.json.
        decoder: What it describes.
        llama_cpp: llama.cpp's architecture.

    Raises:
        UnsupportedModelError: If llama.cpp computes something otherwise.
    """
    text = {**config, **(config.get("text_config") or {})}
    keys = ModelKeys(model_type, text, decoder, llama_cpp)
    _sizes(keys)
    _check_parts(keys)
    rope_keys(keys)
    window_keys(keys)
    OTHERS.get(model_type, _plain)(keys)
    return keys


def _sizes(keys: ModelKeys) -> None:
    decoder, sizes = keys.decoder, keys.decoder.dimensions
    is_layer_norm = isinstance(decoder.norm, LayerNorm)
    epsilon = "layer_norm_epsilon" if is_layer_norm else "layer_norm_rms_epsilon"
    keys.values |= {
        "context_length": int(keys.config.get("max_position_embeddings") or 2048),
        "embedding_length": sizes.hidden_size,
        "block_count": len(decoder.layers),
        "feed_forward_length": sizes.intermediate_size,
        "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        f"attention.{epsilon}": float(decoder.norm.eps),
        "vocab_size": sizes.vocab_size,
    }


def _check_parts(keys: ModelKeys) -> None:
    """Refuses what every architecture fixes, where a model differs."""
    decoder, sizes, llama_cpp = keys.decoder, keys.decoder.dimensions, keys.llama_cpp
    if llama_cpp.is_square and sizes.query_size != sizes.hidden_size:
        raise keys.refuse(
            f"heads that are together {sizes.query_size} wide beside a width of {sizes.hidden_size}"
        )
    if llama_cpp.head == "tied" and not decoder.tied:
        raise keys.refuse("a head of its own (tie_word_embeddings = false)")
    architecture = decoder.architecture()
    for spec in architecture.linears:
        if spec.bias and spec.name.rpartition(".")[2] not in llama_cpp.biases:
            raise keys.refuse(f"a bias of {spec.name}")
    for layer in decoder.layers:
        activation = getattr(layer.mlp, "activation", llama_cpp.activation)
        if isinstance(activation, ClampedGLU):
            if activation != ClampedGLU():
                raise keys.refuse("a swiglu_limit or swiglu_alpha other than gpt-oss's")
        elif activation.replace("swish", "silu") != llama_cpp.activation:
            raise keys.refuse(f"the activation {activation}")


def _check_scales(keys: ModelKeys, **told: float | None) -> None:
    """Refuses factors that are neither usual nor told by a key of the architecture."""
    decoder, head_dim = keys.decoder, keys.decoder.dimensions.head_dim
    usual: dict[str, tuple[Any, Any]] = {
        "embedding_scale": (decoder.embedding_scale, 1.0),
        "residual_scale": (decoder.layers[0].residual_scale, 1.0),
        "logit_scale": (decoder.logit_scale, 1.0),
        "final softcap": (decoder.logit_softcap, None),
    }
    for attention in keys.attentions:
        usual["score scale"] = (attention.scale or head_dim**-0.5, head_dim**-0.5)
        usual["score softcap"] = (attention.softcap, None)
    for name, (value, expected) in usual.items():
        expected = told.get(name.replace(" ", "_"), expected)
        if value is None or expected is None:
            is_same = value is expected
        else:
            is_same = math.isclose(value, expected, rel_tol=_SAME)
        if not is_same:
            raise keys.refuse(f"a {name.replace('_', ' ')} of {value:.6g}")


def _plain(keys: ModelKeys) -> None:
    """Nothing beside what all have."""
    _check_scales(keys)


def _mixtral(keys: ModelKeys) -> None:
    _check_scales(keys)
    _expert_counts(keys)


def _qwen3_moe(keys: ModelKeys) -> None:
    _check_scales(keys)
    experts = _expert_counts(keys)
    keys.values["expert_feed_forward_length"] = experts.intermediate_size


def _olmoe(keys: ModelKeys) -> None:
    sizes = keys.decoder.dimensions
    if sizes.num_key_value_heads != sizes.num_attention_heads:
        raise keys.refuse("fewer heads of keys than of queries")
    _check_scales(keys)
    _expert_counts(keys, normalized=False)


def _qwen2_moe(keys: ModelKeys) -> None:
    _check_scales(keys)
    experts = _expert_counts(keys, normalized=False)
    assert experts.shared is not None
    shared = experts.shared.mlp.dimensions.intermediate_size
    keys.values["expert_feed_forward_length"] = experts.intermediate_size
    keys.values["expert_shared_feed_forward_length"] = shared


def _granite_moe(keys: ModelKeys) -> None:
    _granite_scales(keys)
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


def _gemma(keys: ModelKeys) -> None:
    _check_scales(keys, embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size))


def _gemma2(keys: ModelKeys) -> None:
    softcap, final = keys.attentions[0].softcap, keys.decoder.logit_softcap
    if softcap is None or final is None:
        raise keys.refuse("logits and scores without softcaps")
    keys.values["attn_logit_softcapping"] = float(softcap)
    keys.values["final_logit_softcapping"] = float(final)
    _check_scales(
        keys,
        embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size),
        final_softcap=final,
        score_softcap=softcap,
        score_scale=_scale_of_gemma(keys, largest=46),
    )


def _gemma3(keys: ModelKeys) -> None:
    final = keys.decoder.logit_softcap
    if final is not None:
        keys.values["final_logit_softcapping"] = float(final)
    _check_scales(
        keys,
        embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size),
        final_softcap=final,
        score_scale=_scale_of_gemma(keys, largest=62),
    )


def _scale_of_gemma(keys: ModelKeys, largest: int) -> float:
    """The scores' scale, which llama.cpp takes from the number of layers."""
    sizes = keys.decoder.dimensions
    is_largest = sizes.num_hidden_layers == largest
    squared = sizes.hidden_size // sizes.num_attention_heads if is_largest else sizes.head_dim
    scale: float = float(squared) ** -0.5
    return scale


def _granite(keys: ModelKeys) -> None:
    if any(isinstance(layer.mlp, Experts) for layer in keys.decoder.layers):
        raise keys.refuse("experts")
    _granite_scales(keys)


def _granite_scales(keys: ModelKeys) -> None:
    decoder, attention = keys.decoder, keys.attentions[0]
    scale = attention.scale or decoder.dimensions.head_dim**-0.5
    keys.values |= {
        "attention.scale": float(scale),
        "embedding_scale": float(decoder.embedding_scale),
        "residual_scale": float(decoder.layers[0].residual_scale),
        "logit_scale": 1.0 / decoder.logit_scale,
    }
    _check_scales(
        keys,
        embedding_scale=decoder.embedding_scale,
        residual_scale=decoder.layers[0].residual_scale,
        logit_scale=decoder.logit_scale,
        score_scale=scale,
    )


OTHERS: dict[str, Callable[[ModelKeys], None]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "granitemoe": _granite_moe,
    "gpt_oss": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "granitemoehybrid": _granite,
}
"""By model type, for those that have keys of their own."""
