"""The keys by which a GGUF file tells llama.cpp what to compute, made of a decoder's parts.

What llama.cpp would compute otherwise is refused, since nothing would tell of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from qlora_wgpu.export.gguf import hybrids, mixtures
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.gguf.convolutions import convolving
from qlora_wgpu.export.gguf.gemma4 import gemma4
from qlora_wgpu.export.gguf.latent import latent
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.export.gguf.rope import rope_keys
from qlora_wgpu.export.gguf.scales import check_scales
from qlora_wgpu.export.gguf.windows import window_keys
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.families.parts.mlp import XIELUMLP
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.ops.pointwise import ACTIVATIONS, ClampedGLU

_WITH_QK_NORM = 64  # from so many layers on llama.cpp takes Command R for Command R+


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
    if model_type in WHOLE:
        WHOLE[model_type](keys)
        return keys
    rope_keys(keys)
    window_keys(keys)
    OTHERS.get(model_type, _plain)(keys)
    return keys


def _sizes(keys: ModelKeys) -> None:
    decoder, sizes = keys.decoder, keys.decoder.dimensions
    is_layer_norm = isinstance(decoder.norm, LayerNorm)
    epsilon = "layer_norm_epsilon" if is_layer_norm else "layer_norm_rms_epsilon"
    positions = ConfigReader(keys.config).optional_integer("max_position_embeddings")
    keys.values |= {
        "context_length": positions or 2048,
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
        elif activation in llama_cpp.nearly:
            note = f"llama.cpp computes {llama_cpp.activation}, which is nearly {activation}"
            if note not in keys.notes:
                keys.notes.append(note)
        elif ACTIVATIONS[activation] != ACTIVATIONS[llama_cpp.activation]:
            raise keys.refuse(f"the activation {activation}")


def _plain(keys: ModelKeys) -> None:
    """Nothing beside what all have."""
    check_scales(keys)


def _gemma(keys: ModelKeys) -> None:
    check_scales(keys, embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size))


def _gemma2(keys: ModelKeys) -> None:
    softcap, final = keys.attentions[0].softcap, keys.decoder.logit_softcap
    if softcap is None or final is None:
        raise keys.refuse("logits and scores without softcaps")
    keys.values["attn_logit_softcapping"] = float(softcap)
    keys.values["final_logit_softcapping"] = float(final)
    check_scales(
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
    check_scales(
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


def _stablelm(keys: ModelKeys) -> None:
    check_scales(keys)
    keys.values["use_parallel_residual"] = keys.decoder.layers[0].order.parallel


def _gpt_neox(keys: ModelKeys) -> None:
    _biased(keys)
    keys.values["use_parallel_residual"] = keys.decoder.layers[0].order.parallel


def _phi(keys: ModelKeys) -> None:
    check_scales(keys)
    if keys.attentions[0].qk_norm is not None:
        raise keys.refuse("norms of heads (qk_layernorm)")


def _olmo(keys: ModelKeys) -> None:
    check_scales(keys)
    clip = keys.attentions[0].clip
    if clip is not None:
        keys.values["attention.clamp_kqv"] = float(clip)


def _biased(keys: ModelKeys) -> None:
    check_scales(keys)
    if not all(spec.bias for spec in keys.decoder.architecture().linears):
        raise keys.refuse("layers without biases")


def _cohere(keys: ModelKeys) -> None:
    scale = keys.decoder.logit_scale
    check_scales(keys, logit_scale=scale)
    keys.values["logit_scale"] = float(scale)
    is_large = len(keys.decoder.layers) >= _WITH_QK_NORM
    if keys.model_type == "cohere" and is_large != (keys.attentions[0].qk_norm is not None):
        has = "without" if is_large else "with"
        raise keys.refuse(f"{len(keys.decoder.layers)} layers {has} norms of heads")


def _apertus(keys: ModelKeys) -> None:
    check_scales(keys)
    if not all(isinstance(layer.mlp, XIELUMLP) for layer in keys.decoder.layers):
        raise keys.refuse("another activation than xIELU")


def _ministral3(keys: ModelKeys) -> None:
    check_scales(keys)
    if any(attention.query_rope is None for attention in keys.attentions):
        raise keys.refuse("queries that do not grow with their position")


def _lfm2(keys: ModelKeys) -> None:
    check_scales(keys)
    convolving(keys)


WHOLE: dict[str, Callable[[ModelKeys], None]] = {
    "deepseek_v2": latent,
    "deepseek_v3": latent,
    "glm4_moe_lite": latent,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
}
"""By model type, for those whose rotation and windows are of their own kind, too."""

OTHERS: dict[str, Callable[[ModelKeys], None]] = {
    "mixtral": mixtures.mixtral,
    "qwen3_moe": mixtures.qwen3_moe,
    "qwen2_moe": mixtures.qwen2_moe,
    "olmoe": mixtures.olmoe,
    "granitemoe": mixtures.granite_moe,
    "gpt_oss": mixtures.gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": mixtures.granite,
    "granitemoehybrid": mixtures.granite,
    "granitemoeshared": mixtures.granite_moe,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "ernie4_5_moe": mixtures.ernie4_5_moe,
    "lfm2_moe": mixtures.lfm2_moe,
    "glm4_moe": mixtures.corrected,
    "exaone_moe": mixtures.corrected,
    "stablelm": _stablelm,
    "starcoder2": _biased,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    "olmo": _olmo,
    "cohere": _cohere,
    "cohere2": _cohere,
    "apertus": _apertus,
    "ministral3": _ministral3,
    "lfm2": _lfm2,
    "qwen3_next": hybrids.qwen3_next,
    "qwen3_5_text": hybrids.qwen3_5,
    "qwen3_5_moe_text": hybrids.qwen3_5_moe,
}
"""By model type, for those that have keys of their own."""
