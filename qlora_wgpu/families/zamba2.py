"""Zamba 2 (Zyphra, 2024): Mamba 2, and transformer blocks that several of its layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts

MAMBA, HYBRID = "linear_attention", "hybrid"
LEGACY = {"mamba": MAMBA}
# Those of the layers of Zamba2-2.7B, which is the default.
PUBLISHED = "M" + "MMMMMH" * 7 + "MMMMHMMMHMM"
ORDER = parts.ResidualOrder(before_attention="input_layernorm")
LONG_CONTEXT = 16384


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Blocks take turns: the i-th hybrid layer uses block i modulo ``num_mem_blocks``.

    As in transformers, untied embeddings also untie the blocks: each hybrid layer has its own.
    """
    read.no_dropout("attention_dropout")
    kinds = _kinds(read)
    dimensions = _dimensions(read, len(kinds))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    mamba = _mamba(read, dimensions)
    uses = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    _refuse_other(read, "hybrid_layer_ids", uses)
    plain = parts.Layer(norm, mamba, None, ORDER)
    layers = [plain] * len(kinds)
    blocks, tied = read.integer("num_mem_blocks", 1), read.flag("tie_word_embeddings", True)
    if uses:
        block = _block(read, dimensions, norm.eps)
        for use, i in enumerate(uses):
            own = replace(block, first=uses[use % blocks] if tied else i, use=use)
            layers[i] = parts.HybridLayer(norm, mamba, None, ORDER, block=own)
    return parts.HybridDecoder(
        dimensions,
        norm,
        tuple(layers),
        tied=tied,
        pad_token_id=0,
        final_norm="final_layernorm",
    )


def _kinds(read: parts.ConfigReader) -> list[str]:
    """What each layer is."""
    kinds = parts.read_block_types(read, (MAMBA, HYBRID), LEGACY)
    return [HYBRID if letter == "H" else MAMBA for letter in PUBLISHED] if kinds is None else kinds


def _dimensions(read: parts.ConfigReader, layers: int) -> parts.Dimensions:
    """Heads make up twice the hidden size, unless config.json says another size of a head."""
    hidden_size, heads = read.integer("hidden_size", 2560), read.integer("num_attention_heads", 32)
    _refuse_other(read, "attention_hidden_size", 2 * hidden_size)
    inner = read.count("intermediate_size", 0) or 4 * hidden_size
    head_dim = 2 * hidden_size // heads
    for key in ("attention_head_dim", "head_dim"):
        head_dim = read.integer(key, head_dim)
    whole = {
        **read.config, "num_hidden_layers": layers, "hidden_size": hidden_size,
        "num_attention_heads": heads, "intermediate_size": inner, "head_dim": head_dim,
    }  # fmt: skip
    return parts.Dimensions.read(parts.ConfigReader(whole))


def _refuse_other(read: parts.ConfigReader, key: str, computed: Any) -> None:
    """Refuses a value that other keys do not lead to."""
    if read.config.get(key, computed) != computed:
        raise UnsupportedModelError(
            f"config.json: {key} must be {brief(computed)}, got {brief(read.config[key])}"
        )


def _mamba(read: parts.ConfigReader, dimensions: parts.Dimensions) -> parts.Mamba:
    heads = read.integer("n_mamba_heads", 8)
    inner = read.integer("mamba_expand", 2) * dimensions.hidden_size
    head_dim = read.integer("mamba_headdim", max(inner // heads, 1))
    if heads * head_dim != inner:
        raise UnsupportedModelError(
            f"config.json: n_mamba_heads {heads} times mamba_headdim {head_dim} must be {inner}"
        )
    sizes = {
        "n_mamba_heads": heads,
        "mamba_headdim": head_dim,
        "mamba_ngroups": read.integer("mamba_ngroups", 1),
        "mamba_d_state": read.integer("mamba_d_state", 64),
    }
    bias = read.flag("add_bias_linear")
    return parts.Mamba(
        dimensions,
        parts.MambaSizes.checked(sizes),
        read.integer("mamba_d_conv", 4),
        1e-5,
        (read.number("time_step_min", 0.001), None),
        in_bias=bias,
        out_bias=bias,
    )


def _block(read: parts.ConfigReader, dimensions: parts.Dimensions, eps: float) -> parts.SharedBlock:
    adapts_attention = read.flag("use_shared_attention_adapter")
    wide = 2 * dimensions.hidden_size
    if adapts_attention and (dimensions.query_size, dimensions.key_value_size) != (wide, wide):
        raise UnsupportedModelError(
            "config.json: use_shared_attention_adapter requires heads of queries, and of keys, "
            f"that make up {wide}"
        )
    rope = None
    if read.flag("use_mem_rope"):
        rope = parts.read_rope(_long(read.config), dimensions.head_dim)
    return parts.SharedBlock(
        dimensions,
        eps,
        rope,
        parts.read_activation(read, "gelu"),
        read.flag("add_bias_linear"),
        read.integer("adapter_rank", 128),
        adapts_attention,
        first=0,
        use=0,
    )


def _long(config: Mapping[str, Any]) -> Mapping[str, Any]:
    longer = (
        {"max_position_embeddings": LONG_CONTEXT} if config.get("use_long_context") is True else {}
    )
    return {**config, **longer}
