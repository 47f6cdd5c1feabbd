"""A small config.json of every family, with heads of a given size, from the recorded ones."""

import json
from functools import cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
HEAD_DIMS = (24, 64, 128)
# Of parts that other families have at all of these, or that know of no heads: one tells enough.
COMPOSED = (
    "apertus", "arcee", "bamba", "falcon_h1",
    "cohere2", "ernie4_5", "exaone4", "granitemoehybrid", "ministral3",
    "nemotron", "seed_oss", "stablelm-qknorm", "olmoe", "olmoe-limited", "ernie4_5_moe",
    "flex_olmo", "lfm2_moe", "glm4_moe",
    "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text",
    "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "exaone_moe", "gemma4_unified_text",
    "gpt_neox", "olmo", "afmoe", "granite_swa", "granitemoe_swa", "ministral", "nanochat",
    "nemotron_h", "olmo_hybrid", "solar_open", "youtu",
    "zamba2",
)  # fmt: skip
# Cases whose forward has an op that no first case of a model_type has.
MORE = (
    "cohere-qknorm", "gemma4-dense", "gemma4-experts", "stablelm-qknorm", "mixtral-balanced",
    "ernie4_5_moe-balanced-experts", "olmoe-limited", "phi-qknorm",
)  # fmt: skip


def family_configs():
    """One recorded config.json of each model_type, of its plainest rotation."""
    recorded = {path.stem: _recorded_config(path) for path in FOLDER.glob("*.npz")}
    recorded = {case: config for case, config in recorded.items() if config is not None}
    configs = {}
    for case in sorted(
        recorded, key=lambda c: (_is_scaled(recorded[c]), "rope" in c, "balanced" in c, c)
    ):
        configs.setdefault(recorded[case]["model_type"], recorded[case])
    return configs


def _recorded_config(path):
    """The config.json of a case; None for losses alone, and for a text part within a model."""
    config = _any_config(path)
    return None if "text_config" in (config or ()) else config


def _any_config(path):
    return json.loads(_config_text(path))


@cache
def _config_text(path):
    with np.load(path) as archive:
        return str(archive["config"]) if "config" in archive else "null"


def nested_configs():
    """The recorded config.json of each model_type whose text part is none by itself."""
    recorded = filter(None, map(_any_config, FOLDER.glob("*.npz")))
    return {config["model_type"]: config for config in recorded if "text_config" in config}


def _is_scaled(config):
    return "factor" in config.get("rope_parameters", {})


def traced_configs():
    """The same, and those of cases with ops of their own, by their names."""
    return family_configs() | {case: _recorded_config(FOLDER / f"{case}.npz") for case in MORE}


def head_dims(case):
    """The sizes of heads that a case of ``traced_configs`` is tried with."""
    return HEAD_DIMS[:1] if case in COMPOSED else HEAD_DIMS


def with_head_dim(config, head_dim):
    """The same with 4 heads of head_dim, 2 of keys, and a hidden size that they make up."""
    if "kv_lora_rank" in config:  # heads of latent attention have parts
        parts = {"qk_nope_head_dim": head_dim - 8, "qk_rope_head_dim": 8, "head_dim": 8}
        own = {**parts, "v_head_dim": head_dim - 4, "num_key_value_heads": 4}
        return {**config, **own, "num_attention_heads": 4, "hidden_size": 4 * head_dim}
    # Mamba's heads make up twice the hidden size.
    own = {"mamba_n_heads": head_dim // 4, "mamba_d_head": 32} if "mamba_d_head" in config else {}
    if config["model_type"] == "zamba2":  # heads make up twice the hidden size
        return {
            **config, "hidden_size": 2 * head_dim, "num_attention_heads": 4,
            "num_key_value_heads": 4, "attention_head_dim": head_dim, "mamba_headdim": 32,
            "attention_hidden_size": 4 * head_dim, "n_mamba_heads": head_dim // 8,
            "mamba_ngroups": 1,
        }  # fmt: skip
    return {
        **config,
        **own,
        "head_dim": head_dim,
        "num_attention_heads": 4,
        "num_key_value_heads": 1 if config["num_key_value_heads"] == 1 else 2,
        "hidden_size": 4 * head_dim,
    }
