"""What single families' keys say in GGUF files that no pair of keys does, both ways."""

from __future__ import annotations

import math

import numpy as np

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.parts.mixers import ShortConv
from qlora_wgpu.families.parts.mlp import XIELU, PlainMLP
from qlora_wgpu.gguf.architecture import Config, ModelKeys, check_scales, window_pattern
from qlora_wgpu.gguf.keys import Keys

# ---- those near to Llama -------------------------------------------------------------------------


def read_ministral(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Ministral 3, whose queries grow with their position."""
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        share = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        if share:
            scaling |= {"mscale": 1.0, "mscale_all_dim": share}
    return {
        "rope_parameters": {
            "original_max_position_embeddings": config["max_position_embeddings"],
            **scaling,
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
        },
    }


def check_ministral(keys: ModelKeys) -> None:
    """Refuses queries that do not grow."""
    check_scales(keys)
    if any(attention.query_rope is None for attention in keys.attentions):
        raise keys.refuse("queries that do not grow with their position")


def check_granite(keys: ModelKeys) -> None:
    """Granite's factors have a key each."""
    check_scales(
        keys,
        embedding_scale=keys.decoder.embedding_scale,
        residual_scale=keys.decoder.layers[0].residual_scale,
        logit_scale=keys.decoder.logit_scale,
        score_scale=keys.score_scale,
    )


def read_gpt_oss(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Of YaRN's details, and of the experts' unit, no key tells: they are as published."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default"}}
    is_yarn = scaling["rope_type"] == "yarn"
    return {"rope_scaling": {**scaling, "truncate": False} if is_yarn else scaling}


def read_apertus(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Apertus, whose rotation has another place."""
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    return {"rope_parameters": {**scaling, "rope_theta": config["rope_theta"]}}


def check_apertus(keys: ModelKeys) -> None:
    """Refuses other activations than its own."""
    check_scales(keys)
    mlps = [layer.mlp for layer in keys.decoder.layers]
    if not all(isinstance(mlp, PlainMLP) and mlp.activation == XIELU for mlp in mlps):
        raise keys.refuse("another activation than xIELU")


# ---- windows -------------------------------------------------------------------------------------

_EXAONE_WITH_WINDOWS = 64


def read_cohere2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Command R7B and Command A, one layer of four of which sees everything."""
    return window_pattern(keys, config, 4)


def read_olmo2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """OLMo 2; with a window OLMo 3, whose layers that slide are rotated without scaling."""
    window = keys.integer("attention.sliding_window", 0)
    if not window:
        return {}
    theta = config["rope_theta"]
    keys.refuse("rope.freq_base_swa", theta)
    far = {"rope_type": "default", **config.pop("rope_scaling", {})}
    factor = keys.number("rope.scaling.attn_factor", None)
    if factor is not None:  # which converters take from config.json as it is
        far["attention_factor"] = factor
    near = {"rope_type": "default", "rope_theta": theta}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {**far, "rope_theta": theta},
            "sliding_attention": near,
        },
        "sliding_window": window,
        "attention_bias": False,
        **window_pattern(keys, config, 4),
    }


def read_exaone4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """EXAONE 4; llama.cpp has windows in the model of 64 layers alone."""
    layers = config["num_hidden_layers"]
    if layers == _EXAONE_WITH_WINDOWS:
        keys.refuse("rope.freq_base_swa", config["rope_theta"])
        window = keys.integer("attention.sliding_window", 4096)
        return {"sliding_window": window, **window_pattern(keys, config, 4)}
    keys.refuse("attention.sliding_window", 0)
    return {"sliding_window": None, "layer_types": ["full_attention"] * layers}


# ---- Gemma ---------------------------------------------------------------------------------------


def read_gemma2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 2, every other layer of which slides."""
    return {"query_pre_attn_scalar": _query_scalar(keys, config, largest=46)}


def read_gemma3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 3, text."""
    window, layers = keys.integer("attention.sliding_window", 0), window_pattern(keys, config, 6)
    if not window:  # no layer slides then, whatever the pattern
        layers = {"layer_types": ["full_attention"] * len(layers["layer_types"])}
    return {
        "sliding_window": window or 4096,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _query_scalar(keys, config, largest=62),
        **layers,
    }


def _query_scalar(keys: Keys, config: Config, largest: int) -> float:
    """The reciprocal square of the scores' scale, which files tell by their number of layers."""
    scale = keys.number("attention.scale", 0.0)
    if scale:
        return float(scale) ** -2
    heads: int = config["num_attention_heads"]
    of_largest: float = config["hidden_size"] / heads
    return of_largest if config["num_hidden_layers"] == largest else float(config["head_dim"])


def check_gemma(keys: ModelKeys) -> None:
    """Gemma 1 scales embeddings."""
    check_scales(keys, embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size))


def check_gemma2(keys: ModelKeys) -> None:
    """Refuses what has no softcaps, and another scale of scores."""
    if keys.attentions[0].softcap is None or keys.decoder.logit_softcap is None:
        raise keys.refuse("logits and scores without softcaps")
    _check_gemma(keys, largest=46, score_softcap=keys.attentions[0].softcap)


def check_gemma3(keys: ModelKeys) -> None:
    """Refuses another scale of scores."""
    _check_gemma(keys, largest=62)


def _check_gemma(keys: ModelKeys, largest: int, **told: float | None) -> None:
    """Refuses another scale of scores than that which llama.cpp takes from the layers' number."""
    sizes = keys.decoder.dimensions
    is_largest = sizes.num_hidden_layers == largest
    squared = sizes.hidden_size // sizes.num_attention_heads if is_largest else sizes.head_dim
    check_scales(
        keys,
        embedding_scale=math.sqrt(sizes.hidden_size),
        final_softcap=keys.decoder.logit_softcap,
        score_scale=float(squared) ** -0.5,
        **told,
    )


# ---- layer norms in place of RMS norms -----------------------------------------------------------

_WITH_QK_NORM = 64  # from so many layers on llama.cpp takes Command R for Command R+


def read_stablelm(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """StableLM; without a second norm both halves of a layer are one."""
    parallel = "blk.0.ffn_norm.weight" not in file
    keys.refuse("use_parallel_residual", parallel)
    return {"use_parallel_residual": parallel}


def read_phi2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Phi 1, 1.5 and 2."""
    if "blk.0.attn_qkv.weight" in file:
        raise UnsupportedModelError(
            f"{file.path} has q, k and v of Phi 2 in one tensor, as old files do: take a newer "
            "one, or the model's safetensors version"
        )
    return {}


def check_phi(keys: ModelKeys) -> None:
    """Refuses norms of heads."""
    check_scales(keys)
    if keys.attentions[0].qk_norm is not None:
        raise keys.refuse("norms of heads (qk_layernorm)")


def padding(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """The token of padding, which a family asks for."""
    return {"pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id")}


def read_gpt_neox(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """GPT-NeoX, whose rotation has another name."""
    return {"rotary_emb_base": config["rope_theta"]}


def check_biased(keys: ModelKeys) -> None:
    """Refuses layers without biases."""
    check_scales(keys)
    if not all(spec.bias for spec in keys.decoder.architecture().linears):
        raise keys.refuse("layers without biases")


def check_cohere(keys: ModelKeys) -> None:
    """Refuses norms of heads where llama.cpp expects none, and none where it expects them."""
    check_scales(keys, logit_scale=keys.decoder.logit_scale)
    layers, has_norms = len(keys.decoder.layers), keys.attentions[0].qk_norm is not None
    if keys.model_type == "cohere" and (layers >= _WITH_QK_NORM) != has_norms:
        raise keys.refuse(f"{layers} layers {'with' if has_norms else 'without'} norms of heads")


# ---- convolutions --------------------------------------------------------------------------------


def read_convolving(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Which layers convolve."""
    heads = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    return {"layer_types": ["full_attention" if count else "conv" for count in heads]}


def write_convolving(keys: ModelKeys) -> None:
    """Which layers convolve, by their heads of keys."""
    check_scales(keys)
    convolutions = [half for half in keys.halves if isinstance(half, ShortConv)]
    if not convolutions:
        raise keys.refuse("layers that all attend")
    if convolutions[0].taps < 2:
        raise keys.refuse("a convolution of one token")
    heads = keys.decoder.dimensions.num_key_value_heads
    counts = [0 if isinstance(half, ShortConv) else heads for half in keys.halves]
    keys.values["attention.head_count_kv"] = np.array(counts, np.uint32)
