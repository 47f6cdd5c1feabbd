"""The keys by which a GGUF file tells llama.cpp what to compute, made of a decoder's parts.

What llama.cpp would compute otherwise is refused, since nothing would tell of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.architecture import FACTORS, LONG_FACTORS, SHORT_FACTORS
from qlora_wgpu.export.gguf import families
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.gguf.families import convolving, gemma4, latent, rotation_factors
from qlora_wgpu.export.gguf.model_keys import ModelKeys, check_scales, window_keys
from qlora_wgpu.families.gpt_oss import YARN
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.families.parts.mlp import XIELUMLP
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import Rope
from qlora_wgpu.ops.pointwise import ACTIVATIONS, ClampedGLU

# ---- rotations -----------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
_NO_ROTATION_EACH = {"SMOLLM3": 4}  # the layers that llama.cpp leaves unrotated
# Where it rotates layers with a window alone, if there are any.
_ROTATES_SLIDING = ("COHERE2", "EXAONE4", "EXAONE_MOE")
_GROWS = "MISTRAL3"  # whose queries grow with their position


def rope_keys(keys: ModelKeys) -> None:
    """Adds the base, the elements that are rotated, and how frequencies are scaled."""
    _check_layers(keys)
    far, near = _ropes(keys)
    keys.values["rope.dimension_count"] = far.rotary_dim
    keys.values["rope.freq_base"] = float(far.theta)
    if near is not None and keys.llama_cpp.label == "OLMO2":
        if near.kind != "default" or near.theta != far.theta:
            raise keys.refuse("layers with a window whose rotation is scaled or has another base")
    elif near is not None:
        if near.kind != "default":
            raise keys.refuse("a scaled rotation of layers with a window")
        keys.values["rope.freq_base_swa"] = float(near.theta)
    _scaling_keys(keys, far)


def _check_layers(keys: ModelKeys) -> None:
    """Refuses layers that rotate, or do not, where llama.cpp does otherwise."""
    label = keys.llama_cpp.label
    each = _NO_ROTATION_EACH.get(label)
    has_windows = any(attention.window is not None for attention in keys.attentions)
    if keys.llama_cpp.windows == "of 64 layers" and len(keys.decoder.layers) != 64:
        has_windows = False  # that llama.cpp knows of: it rotates all layers then
    for i, attention in enumerate(keys.attentions):
        rotates = each is None or (i + 1) % each != 0
        if label in _ROTATES_SLIDING and has_windows:
            rotates = attention.window is not None
        if (attention.rope is not None) != rotates:
            raise keys.refuse(f"positions in layer {i} as this model does")
        if attention.query_rope is not None and label != _GROWS:
            raise keys.refuse("queries that are rotated in another way than keys")


def _ropes(keys: ModelKeys) -> tuple[Rope, Rope | None]:
    """The rotation of layers that see everything, and of those that slide, if that differs."""
    both: dict[bool, Rope] = {}
    for attention in keys.attentions:
        if attention.rope is not None:
            both.setdefault(attention.window is not None, attention.rope)
    far = both.get(False, both.get(True))
    if far is None:
        raise keys.refuse("attention that knows no positions")
    near = both.get(True)
    if keys.llama_cpp.label in _ROTATES_SLIDING:
        return far, None
    is_same = near is None or (near.theta, near.kind) == (far.theta, far.kind)
    return far, None if is_same and keys.llama_cpp.windows != "periodic" else near


def _scaling_keys(keys: ModelKeys, rope: Rope) -> None:
    given = _parameters(keys)
    if rope.kind == "linear":
        keys.values["rope.scaling.type"] = "linear"
        keys.values["rope.scaling.factor"] = float(given["factor"])
    elif rope.kind == "yarn":
        _yarn_keys(keys, rope, given)
    elif rope.kind not in ("default", "llama3", "longrope"):
        raise keys.refuse(f"RoPE of type {rope.kind}")
    growth = next((a.query_rope.growth for a in keys.attentions if a.query_rope is not None), None)
    if growth is not None:
        keys.values["attention.temperature_scale"] = float(growth.beta)
        if keys.values.get("rope.scaling.original_context_length") != growth.length:
            raise keys.refuse("queries that grow without YaRN, or by another length than its own")
    if rope.kind == "longrope":
        keys.values["rope.scaling.type"] = "longrope"  # without it LLAMA leaves its tensors out
        keys.values["rope.scaling.attn_factor"] = float(rope.factor)
        keys.values["rope.scaling.original_context_length"] = int(
            given.get("original_max_position_embeddings")
            or keys.config.get("original_max_position_embeddings")
            or keys.values["context_length"]
        )


def _yarn_keys(keys: ModelKeys, rope: Rope, given: dict[str, Any]) -> None:
    """llama.cpp's own are the usual beta, and a factor of cosines that follows from the scale."""
    factor = float(given["factor"])
    stretch = 0.1 * np.log(factor) if factor > 1 else 0.0
    usual = stretch + 1.0
    if keys.llama_cpp.label == _GROWS:
        share = float(given.get("mscale_all_dim") or 0.0)
        usual /= stretch * share + 1.0
        keys.values["rope.scaling.yarn_log_multiplier"] = share
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    # Of gpt-oss it reads what is told of others, and the published ones are not truncated.
    truncates = keys.llama_cpp.label != "GPT_OSS"
    is_usual = given.get("truncate", True) == truncates
    if not np.isclose(rope.factor, usual, rtol=1e-5) or not is_usual:
        raise keys.refuse("YaRN with factors of its own (mscale, attention_factor, truncate)")
    if betas != (32, 1):
        raise keys.refuse(f"YaRN with beta_fast and beta_slow of {betas}")
    length = given.get("original_max_position_embeddings") or keys.config.get(
        "original_max_position_embeddings", keys.values["context_length"]
    )
    keys.values |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(length),
    }


def _parameters(keys: ModelKeys) -> dict[str, Any]:
    """The rotation's own keys in config.json, those of layers that see everything."""
    given = keys.config.get("rope_scaling") or keys.config.get("rope_parameters") or {}
    if not given and keys.llama_cpp.label == "GPT_OSS":
        given = YARN
    given = given.get("full_attention") or given
    return dict(given)


def rope_tensors(keys: ModelKeys) -> dict[str, FloatArray]:
    """By what the frequency of each pair is divided, where no key tells it."""
    if keys.llama_cpp.label == "GEMMA4":
        return rotation_factors(keys)
    rope = next((a.rope for a in keys.attentions if a.rope is not None), None)
    if rope is None:  # latent attention's, which keys tell of whole
        return {}
    if rope.kind == "llama3":
        if "llama3" not in keys.llama_cpp.scalings:
            raise keys.refuse("RoPE of type llama3")
        return {FACTORS: _divisors(rope, 1)}
    if rope.kind == "longrope":
        if "longrope" not in keys.llama_cpp.scalings:
            raise keys.refuse("RoPE of type longrope")
        given = _parameters(keys)
        lists = {SHORT_FACTORS: given["short_factor"], LONG_FACTORS: given["long_factor"]}
        return {name: np.array(values, np.float32) for name, values in lists.items()}
    return {}


def _divisors(rope: Rope, length: int) -> FloatArray:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = float(rope.theta) ** -exponents
    return (plain / rope.frequencies(length)).astype(np.float32)


# ---- all keys of a model -------------------------------------------------------------------------

_WITH_QK_NORM = 64  # from so many layers on llama.cpp takes Command R for Command R+


def model_keys(
    model_type: str, config: Mapping[str, Any], decoder: Decoder, llama_cpp: LlamaCpp
) -> ModelKeys:
    """What a file says of a model."""
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
    "mixtral": families.mixtral,
    "qwen3_moe": families.qwen3_moe,
    "qwen2_moe": families.qwen2_moe,
    "olmoe": families.olmoe,
    "granitemoe": families.granite_moe,
    "gpt_oss": families.gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": families.granite,
    "granitemoehybrid": families.granite,
    "granitemoeshared": families.granite_moe,
    "hunyuan_v1_moe": families.hunyuan_moe,
    "ernie4_5_moe": families.ernie4_5_moe,
    "lfm2_moe": families.lfm2_moe,
    "glm4_moe": families.corrected,
    "exaone_moe": families.corrected,
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
    "qwen3_next": families.qwen3_next,
    "qwen3_5_text": families.qwen3_5,
    "qwen3_5_moe_text": families.qwen3_5_moe,
}
"""By model type, for those that have keys of their own."""
