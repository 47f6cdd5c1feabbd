"""Families' own details in GGUF files, both ways: what no pair of keys describes."""

from __future__ import annotations

import math

import numpy as np

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.gguf.architecture import Config, Keys, ModelKeys, check_scales, window_pattern

# ---- similar to Llama ----------------------------------------------------------------------------


def read_ministral(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Ministral 3, whose queries are scaled by their position."""
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
    """Refuses queries that are not scaled."""
    check_scales(keys)
    if any(attention.query_rope is None for attention in keys.attentions):
        raise keys.unsupported("queries that are not scaled by their position")


def check_granite(keys: ModelKeys) -> None:
    """Allows any factors: Granite has a key for each."""
    check_scales(
        keys,
        embedding_scale=keys.decoder.embedding_scale,
        residual_scale=keys.decoder.layers[0].residual_scale,
        logit_scale=keys.decoder.logit_scale,
        score_scale=keys.score_scale,
    )


def read_granite_swa(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Granite with sliding windows; the file lists layers with a window, and with RoPE."""
    theta, layers = config["rope_theta"], config["num_hidden_layers"]
    rotates = keys.raw("attention.rope_pattern", np.ones(min(layers, 1 << 16), np.bool_))
    if not isinstance(rotates, np.ndarray) or len(rotates) != layers:
        raise CheckpointError(
            f"{keys.where}: granite_swa.attention.rope_pattern must have a value for each of the "
            f"{layers} layers"
        )
    bases = [theta if rotated else 0 for rotated in rotates.tolist()]
    return {**window_pattern(keys, config, 4), "layer_rope_theta": bases}


def write_granite_swa(keys: ModelKeys) -> None:
    """Adds which layers have RoPE, with the same base in all of them."""
    check_granite(keys)
    ropes = [attention.rope for attention in keys.attentions]
    rotated = [rope for rope in ropes if rope is not None]
    if any(rope != rotated[0] for rope in rotated):
        raise keys.unsupported("layers whose RoPE has different bases (layer_rope_theta)")
    if "attention.sliding_window" not in keys.values:
        raise keys.unsupported("full attention in every layer")
    keys.values["attention.rope_pattern"] = np.array([rope is not None for rope in ropes])


def read_gpt_oss(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """No key has YaRN's details or the experts' activation: they are as published."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default"}}
    is_yarn = scaling["rope_type"] == "yarn"
    return {"rope_scaling": {**scaling, "truncate": False} if is_yarn else scaling}


def read_apertus(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Apertus, whose rotation is under ``rope_parameters``."""
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    return {"rope_parameters": {**scaling, "rope_theta": config["rope_theta"]}}


# ---- windows -------------------------------------------------------------------------------------


def read_olmo2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """OLMo 2; with a window OLMo 3, whose sliding layers have an unscaled rotation."""
    window = keys.integer("attention.sliding_window", 0)
    if not window:
        return {}
    theta = config["rope_theta"]
    keys.require("rope.freq_base_swa", theta)
    full = {"rope_type": "default", **config.pop("rope_scaling", {})}
    factor = keys.number("rope.scaling.attn_factor", None)
    if factor is not None:  # converters copy it from config.json
        full["attention_factor"] = factor
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "sliding_window": window,
        "attention_bias": False,
        **window_pattern(keys, config, 4),
    }


def read_exaone4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """EXAONE 4; llama.cpp supports windows only in the model of 64 layers."""
    layers = config["num_hidden_layers"]
    if layers == 64:
        keys.require("rope.freq_base_swa", config["rope_theta"])
        window = keys.integer("attention.sliding_window", 4096)
        return {"sliding_window": window, **window_pattern(keys, config, 4)}
    keys.require("attention.sliding_window", 0)
    return {"sliding_window": None, "layer_types": ["full_attention"] * layers}


# ---- Gemma ---------------------------------------------------------------------------------------


def read_gemma2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 2, where every other layer has a window."""
    return {"query_pre_attn_scalar": _query_scalar(keys, config, largest=46)}


def read_gemma3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 3, text."""
    window, layers = keys.integer("attention.sliding_window", 0), window_pattern(keys, config, 6)
    if not window:  # all layers have full attention then, whatever the pattern
        layers = {"layer_types": ["full_attention"] * len(layers["layer_types"])}
    return {
        "sliding_window": window or 4096,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _query_scalar(keys, config, largest=62),
        **layers,
    }


def _query_scalar(keys: Keys, config: Config, largest: int) -> float:
    """The reciprocal square of the scores' scale, which follows from the number of layers."""
    scale = keys.number("attention.scale", 0.0)
    if scale:
        return float(scale) ** -2
    heads: int = config["num_attention_heads"]
    of_largest: float = config["hidden_size"] / heads
    return of_largest if config["num_hidden_layers"] == largest else float(config["head_dim"])


def check_gemma(keys: ModelKeys) -> None:
    """Gemma 1, which scales embeddings."""
    check_scales(keys, embedding_scale=math.sqrt(keys.decoder.dimensions.hidden_size))


def check_gemma2(keys: ModelKeys) -> None:
    """Refuses missing softcaps, and another scale of scores."""
    if keys.attentions[0].softcap is None or keys.decoder.logit_softcap is None:
        raise keys.unsupported("logits and scores without softcaps")
    _check_gemma(keys, largest=46, score_softcap=keys.attentions[0].softcap)


def check_gemma3(keys: ModelKeys) -> None:
    """Refuses another scale of scores."""
    _check_gemma(keys, largest=62)


def _check_gemma(keys: ModelKeys, largest: int, **supported: float | None) -> None:
    """Refuses any scale of scores but the one that llama.cpp derives from the number of layers."""
    sizes = keys.decoder.dimensions
    is_largest = sizes.num_hidden_layers == largest
    squared = sizes.hidden_size // sizes.num_attention_heads if is_largest else sizes.head_dim
    check_scales(
        keys,
        embedding_scale=math.sqrt(sizes.hidden_size),
        final_softcap=keys.decoder.logit_softcap,
        score_scale=float(squared) ** -0.5,
        **supported,
    )


# ---- LayerNorm in place of RMSNorm ---------------------------------------------------------------


def read_stablelm(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """StableLM; without a second norm attention and MLP run in parallel."""
    parallel = "blk.0.ffn_norm.weight" not in file
    keys.require("use_parallel_residual", parallel)
    return {"use_parallel_residual": parallel}


def read_phi2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Phi 1, 1.5 and 2."""
    if "blk.0.attn_qkv.weight" in file:
        raise UnsupportedModelError(
            f"{file.path} has q, k and v of Phi 2 in one tensor, as old files do: use a newer "
            "file, or the model's safetensors version"
        )
    return {}


def check_phi(keys: ModelKeys) -> None:
    """Refuses QK norms."""
    check_scales(keys)
    if keys.attentions[0].qk_norm is not None:
        raise keys.unsupported("QK norms (qk_layernorm)")


def read_padding(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """The padding token, which some families require."""
    return {"pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id")}


def check_biased(keys: ModelKeys) -> None:
    """Refuses layers without biases."""
    check_scales(keys)
    if not all(spec.bias for spec in keys.decoder.architecture().linears):
        raise keys.unsupported("layers without biases")


def check_cohere(keys: ModelKeys) -> None:
    """Refuses Command R with QK norms, and Command R+ (64 layers or more) without them."""
    check_scales(keys, logit_scale=keys.decoder.logit_scale)
    layers, has_norms = len(keys.decoder.layers), keys.attentions[0].qk_norm is not None
    if keys.model_type == "cohere" and (layers >= 64) != has_norms:
        raise keys.unsupported(f"{layers} layers {'with' if has_norms else 'without'} QK norms")
