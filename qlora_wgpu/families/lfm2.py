"""LFM2 (Liquid AI, 2025): gated short convolutions instead of attention in most layers."""

from collections.abc import Sequence
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts

ORDER = parts.ResidualOrder(before_attention="operator_norm", before_mlp="ffn_norm")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """``layer_types`` or ``full_attn_idxs`` selects the layers with attention."""
    read = read.with_defaults(num_key_value_heads=8, intermediate_size=12288)
    dimensions = replace(parts.Dimensions.read(read), intermediate_size=_intermediate_size(read))
    attends = _attending(read, dimensions.num_hidden_layers)
    return compose_with(read, dimensions, attends, [gated_mlp(dimensions)] * len(attends))


def gated_mlp(dimensions: parts.Dimensions) -> parts.GatedMLP:
    return parts.GatedMLP(dimensions, "silu", name="feed_forward", leaves=("w1", "w3", "w2"))


def compose_with(
    read: parts.ConfigReader,
    dimensions: parts.Dimensions,
    attends: Sequence[bool],
    mlps: Sequence[parts.Half],
) -> parts.Decoder:
    if dimensions.hidden_size % 8:
        raise UnsupportedModelError(
            f"config.json: hidden_size {dimensions.hidden_size} of 'lfm2' must be a multiple of 8"
        )
    eps = read.number("norm_eps", 1e-5)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_theta=1_000_000.0),
        qk_norm=parts.QKNorm(eps, names=("q_layernorm", "k_layernorm")),
        output="out_proj",
    )
    convolution = parts.ShortConv(
        dimensions, read.integer("conv_L_cache", 3), read.flag("conv_bias")
    )
    norm = parts.RMSNorm(eps)
    return parts.Decoder(
        dimensions,
        norm,
        layers=tuple(
            parts.Layer(norm, attention if own else convolution, mlp, ORDER)
            for own, mlp in zip(attends, mlps, strict=True)
        ),
        tied=read.flag("tie_embedding", read.flag("tie_word_embeddings", True)),
        pad_token_id=0,
        final_norm="embedding_norm",
    )


def _intermediate_size(read: parts.ConfigReader) -> int:
    """Rows of gate and up: by default two thirds of the key's value, rounded up."""
    key = "block_ff_dim" if "block_ff_dim" in read.config else "intermediate_size"
    size = read.integer(key)
    if not read.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if read.config.get("block_ffn_dim_multiplier", 1.0) is not None:
        size = int(read.number("block_ffn_dim_multiplier", 1.0) * size)
        multiple = read.integer("block_multiple_of", 256)
        size = -(-size // multiple) * multiple
    return parts.ConfigReader({key: size}).integer(key)


def _attending(read: parts.ConfigReader, layers: int) -> list[bool]:
    if read.config.get("layer_types") is None:
        chosen = read.config.get("full_attn_idxs")
        if chosen is None:
            return [True] * layers
        if not isinstance(chosen, list) or not all(type(i) is int for i in chosen):
            raise UnsupportedModelError(
                f"config.json: full_attn_idxs must be layer indices, got {brief(chosen)}"
            )
        return [i in set(chosen) for i in range(layers)]
    return attending_types(read, layers)


def attending_types(read: parts.ConfigReader, layers: int) -> list[bool]:
    types = read.layer_kinds("layer_types", ("conv", "full_attention"), layers)
    return [kind == "full_attention" for kind in types]
