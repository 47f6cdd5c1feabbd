"""Hybrids with Mamba 2 in GGUF files, both ways: Bamba, Granite 4, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.nemotron_h import ATTENTION, EXPERTS, MAMBA, MLP
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.families.parts.mamba import Mamba, ParallelMixers
from qlora_wgpu.families.parts.mlp import GatedMLP, PlainMLP
from qlora_wgpu.families.parts.moe import SparseMoeBlock
from qlora_wgpu.gguf.architecture import MTP_LAYERS, Config, Keys, ModelKeys, check_scales
from qlora_wgpu.gguf.families import check_granite
from qlora_wgpu.gguf.mixtures import SHARED, check_every_layer, check_groups, read_groups

EXPANSION = 2  # llama.cpp's only ratio of Mamba's inner size to hidden_size
MINIMUM_STEP = 0.001  # Nemotron-H's time_step_min, which no file has
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
    return {"mamba_expand": EXPANSION, **_heads(keys, inner, heads)}


def read_parallel(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Falcon-H1, whose weights include all factors."""
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if heads < 1 or inner % heads:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.ssm.inner_size {inner} must be a multiple of "
            f"ssm.time_step_rank {heads}"
        )
    return {
        "mamba_d_ssm": inner,
        **_heads(keys, inner, heads),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def read_nemotron_h(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Nemotron-H, whose layers differ in their key heads and the width of their MLP."""
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    layers = count - keys.integer(MTP_LAYERS, 0)
    heads = keys.each("attention.head_count_kv", count)[:layers]
    widths = keys.each("feed_forward_length", count)[:layers]
    inner, mamba_heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    key_heads, sizes = {*heads} - {0}, {*widths} - {0}
    if (
        len(key_heads) != 1
        or len(sizes) > 1
        or any(a and b for a, b in zip(heads, widths, strict=True))
    ):
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}'s layers must have either key heads, as many in "
            f"all, or an MLP of one size, or neither, got {heads} and {widths}"
        )
    if mamba_heads < 1 or inner % mamba_heads:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.ssm.inner_size {inner} must be a multiple of "
            f"ssm.time_step_rank {mamba_heads}"
        )
    keys.require("attention.value_length", head_dim)
    has_experts = keys.architecture == "nemotron_h_moe"
    wide = EXPERTS if has_experts else MLP
    kinds = [ATTENTION if k else wide if w else MAMBA for k, w in zip(heads, widths, strict=True)]
    own = {} if has_experts else {"mlp_bias": _has(file, "ffn_up.bias")}
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": key_heads.pop(),
        "intermediate_size": sizes.pop() if sizes and not has_experts else 1,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": inner // mamba_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "time_step_min": MINIMUM_STEP,
        **own,
        **(_read_experts(keys, file, config) if has_experts else {}),
    }


def _read_experts(keys: Keys, file: GGUFFile, config: Config) -> Config:
    latent = keys.integer("moe_latent_size", 0) or None
    return {**read_groups(keys, file, config), "moe_latent_size": latent}


def _heads(keys: Keys, inner: int, heads: int) -> Config:
    return {
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
    counts = [
        keys.decoder.dimensions.num_key_value_heads if isinstance(mixer, Attention) else 0
        for mixer in keys.mixers
    ]
    keys.values |= {
        "attention.head_count_kv": np.array(counts, np.uint32),
        _ROTATES: keys.attentions[0].rope is not None,
        **_mamba_keys(keys, mamba),
    }
    if keys.mixtures:
        check_every_layer(keys)
        keys.values |= {
            "expert_count": keys.experts.num_experts,
            "expert_used_count": keys.experts.num_experts_per_tok,
            SHARED: keys.shared_size,
        }


def _mamba_keys(keys: ModelKeys, mamba: Mamba, minimum: float = 0.0) -> Config:
    if mamba.limits != (minimum, None):
        raise keys.unsupported("these bounds of the time steps (time_step_limit, time_step_min)")
    if not mamba.conv_bias:  # with which llama.cpp crashes
        raise keys.unsupported("a convolution without bias")
    return {
        "ssm.conv_kernel": mamba.taps,
        "ssm.state_size": mamba.sizes.state_size,
        "ssm.group_count": mamba.sizes.groups,
        "ssm.inner_size": mamba.sizes.inner_size,
        "ssm.time_step_rank": mamba.sizes.heads,
    }


def write_nemotron_h(keys: ModelKeys) -> None:
    """Adds the keys of Mamba, and which layers have it, attention, and MLPs or experts."""
    check_scales(keys)
    mambas = [mixer for mixer in keys.mixers if isinstance(mixer, Mamba)]
    if not mambas or not keys.attentions:
        raise keys.unsupported("a model without Mamba or without attention")
    mlps = [layer.mlp for layer in keys.decoder.layers if layer.mlp is not None]
    if 0 < len(keys.mixtures) < len(mlps):
        raise keys.unsupported("layers with experts next to layers with an MLP")
    widths = [_width(layer.mlp) for layer in keys.decoder.layers]
    heads = [
        keys.decoder.dimensions.num_key_value_heads if isinstance(mixer, Attention) else 0
        for mixer in keys.mixers
    ]
    keys.values |= {
        "attention.head_count_kv": np.array(heads, np.uint32),
        "feed_forward_length": np.array(widths, np.uint32),
        "attention.layer_norm_epsilon": float(keys.decoder.norm.eps),  # which llama.cpp asks for
        _ROTATES: False,
        **_mamba_keys(keys, mambas[0], MINIMUM_STEP),
    }
    keys.notes.append(
        f"llama.cpp has no minimum time step (time_step_min = {MINIMUM_STEP}): its results differ "
        "slightly where steps are shorter"
    )
    if keys.mixtures:
        check_groups(keys)
        if keys.experts.latent is not None:
            keys.values["moe_latent_size"] = keys.experts.latent.size


def _width(mlp: object) -> int:
    """The size that tells a layer with an MLP or experts from others, which have 0."""
    if isinstance(mlp, SparseMoeBlock):
        return mlp.intermediate_size
    return mlp.dimensions.intermediate_size if isinstance(mlp, PlainMLP) else 0


def write_parallel(keys: ModelKeys) -> None:
    """Adds the keys of Falcon-H1's Mamba; ``row_factors`` has what llama.cpp has no keys for."""
    mixers = keys.mixers[0]
    assert isinstance(mixers, ParallelMixers)
    if mixers.mamba.gate == "after":
        raise keys.unsupported("a norm before the gate (mamba_norm_before_gate)")
    keys.values |= _mamba_keys(keys, mixers.mamba)


def row_factors(decoder: Decoder, leaf: str, rows: int) -> npt.NDArray[np.float32] | None:
    """Factors of the rows of Falcon-H1's layers, by the last part of their name; None for ones."""
    layer = decoder.layers[0]
    mixers, mlp = layer.attention, layer.mlp
    assert isinstance(mixers, ParallelMixers) and isinstance(mlp, GatedMLP)
    attention, mamba = mixers.attention, mixers.mamba
    sizes, unscaled = mamba.sizes, attention.dimensions.head_dim**-0.5
    widths = (sizes.inner_size,) * 2 + (sizes.group_size,) * 2 + (sizes.heads,)
    factors = {
        "k_proj": (attention.scale or unscaled) / unscaled,  # of the scores
        "o_proj": mixers.multiplier,
        "out_proj": mixers.mamba_multiplier,
        "gate_proj": mlp.gate_multiplier,
        "down_proj": mlp.multiplier,
        "lm_head": decoder.logit_scale,
        "embed_tokens": decoder.embedding_scale,
    }
    each = [factors.get(leaf, 1.0)] * rows
    if leaf == "in_proj":
        each = np.repeat(mamba.multipliers, widths).tolist()
    array = np.array(each, np.float32)
    return None if (array == 1.0).all() else array
