"""Hybrids with Mamba 2 in GGUF files, both ways: Bamba's and Granite 4's."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.mamba import Mamba
from qlora_wgpu.gguf.architecture import Config, Keys, ModelKeys
from qlora_wgpu.gguf.families import check_granite
from qlora_wgpu.gguf.mixtures import SHARED, check_every_layer

EXPANSION = 2  # llama.cpp's only ratio of Mamba's inner size to hidden_size
_ROTATES = "rope.scaling.finetuned"  # whether layers with attention have RoPE
_FACTORS = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip

# ---- reading -------------------------------------------------------------------------------------


def read_hybrid(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Granite 4 with Mamba, or Bamba: only the latter rotates half of each head."""
    counts = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    attends = [count > 0 for count in counts]
    mixer = {**_sizes(keys, config), "mamba_conv_bias": _has(file, "ssm_conv1d.bias")}
    biases = {"attention_bias": any(f"blk.{i}.attn_q.bias" in file for i in range(len(attends)))}
    rotates, share = keys.flag(_ROTATES, True), config.pop("partial_rotary_factor")
    if rotates and share == 0.5:
        _refuse_factors(keys, config)
        for key in ("expert_count", "expert_used_count"):
            keys.require(key, 0)
        layers = [i for i, attend in enumerate(attends) if attend]
        biases |= {"mlp_bias": "blk.0.ffn_up.bias" in file}
        own = {"model_type": "bamba", "architectures": ["BambaForCausalLM"]}
        return {**own, **mixer, **biases, "attn_layer_indices": layers}
    keys.require("rope.dimension_count", config["head_dim"])
    experts, size = keys.integer("expert_count", 0), config["intermediate_size"]
    return {
        **mixer,
        **biases,
        "layer_types": ["attention" if attend else "mamba" for attend in attends],
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count", 0),
        "shared_intermediate_size": keys.integer(SHARED, 0 if experts else size),
    }


def _sizes(keys: Keys, config: Config) -> Config:
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if inner != EXPANSION * config["hidden_size"] or heads < 1 or inner % heads:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.ssm.inner_size must be {EXPANSION} times "
            f"embedding_length and a multiple of ssm.time_step_rank, got {inner} and {heads}"
        )
    return {
        "mamba_expand": EXPANSION,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
    }


def _has(file: GGUFFile, leaf: str) -> bool:
    return any(name.endswith(leaf) for name in file.names())


def _refuse_factors(keys: Keys, config: Config) -> None:
    """Refuses Granite's factors in a file of Bamba, which has none."""
    usual = {"attention_multiplier": config["head_dim"] ** -0.5}
    for name in _FACTORS:
        if not np.isclose(value := config.pop(name), usual.get(name, 1.0), rtol=1e-5):
            raise UnsupportedModelError(
                f"{keys.where}: {name} = {value:g} is not supported for Bamba models"
            )


# ---- writing -------------------------------------------------------------------------------------


def write_hybrid(keys: ModelKeys) -> None:
    """Adds all keys of Mamba, which layers have it, and those of experts."""
    mixers = [mixer for mixer in keys.mixers if isinstance(mixer, Mamba)]
    if len(mixers) == len(keys.mixers):
        raise keys.unsupported("a model without attention")
    check_granite(keys)
    mamba, sizes = mixers[0], mixers[0].sizes
    hidden_size = keys.decoder.dimensions.hidden_size
    if sizes.inner_size != EXPANSION * hidden_size:
        raise keys.unsupported(f"a mamba_expand other than {EXPANSION}")
    if mamba.limits != (0.0, None):
        raise keys.unsupported("bounds of the time steps (time_step_limit)")
    counts = [
        keys.decoder.dimensions.num_key_value_heads if isinstance(mixer, Attention) else 0
        for mixer in keys.mixers
    ]
    keys.values |= {
        "attention.head_count_kv": np.array(counts, np.uint32),
        _ROTATES: keys.attentions[0].rope is not None,
        "ssm.conv_kernel": mamba.taps,
        "ssm.state_size": sizes.state_size,
        "ssm.group_count": sizes.groups,
        "ssm.inner_size": sizes.inner_size,
        "ssm.time_step_rank": sizes.heads,
    }
    if keys.mixtures:
        check_every_layer(keys)
        keys.values |= {
            "expert_count": keys.experts.num_experts,
            "expert_used_count": keys.experts.num_experts_per_tok,
            SHARED: keys.shared_size,
        }
