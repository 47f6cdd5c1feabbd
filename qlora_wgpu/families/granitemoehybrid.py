"""Granite 4 (IBM, 2025): as Granite 3, with gate and up fused, and Mamba 2 in most layers."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts
from qlora_wgpu.families.bamba import SILU
from qlora_wgpu.families.granite import compose_with
from qlora_wgpu.families.granitemoe import read_experts, shared_mlp

MAMBA = ("mamba", "linear_attention")
ATTENTION = ("attention", "full_attention")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """An MLP, next to experts if there are any; ``layer_types`` selects the layers with Mamba."""
    read = read.with_defaults(intermediate_size=11008)  # the experts' size
    dimensions = parts.Dimensions.read(read)
    kind = read.choice("position_embedding_type", (None, "rope", "nope"))
    rope = parts.read_rope(read.config, dimensions.head_dim) if kind == "rope" else None
    size = read.integer("shared_intermediate_size", 1024)
    mlp = shared_mlp(dimensions, size, parts.read_activation(read))
    if read.count("num_local_experts", 8) == 0:
        return _with_mamba(read, compose_with(read, mlp.dimensions, mlp, rope))
    decoder = compose_with(read, dimensions, read_experts(read, dimensions, mlp), rope)
    decoder = replace(decoder, balance=parts.read_balance_loss(read))
    return _with_mamba(read, decoder)


def _with_mamba(read: parts.ConfigReader, decoder: parts.Decoder) -> parts.Decoder:
    kinds = _kinds(read, len(decoder.layers))
    if not set(kinds) & set(MAMBA):
        return decoder
    # The convolution applies the MLP's activation, and supports SiLU alone.
    read.choice("hidden_act", SILU, "silu")
    mamba = parts.read_mamba(read, decoder.dimensions, eps=decoder.norm.eps)
    if mamba.out_bias and decoder.layers[0].residual_scale != 1.0:
        raise UnsupportedModelError(
            "config.json: residual_multiplier with mamba_proj_bias is not supported"
        )
    return replace(
        decoder,
        layers=tuple(
            replace(layer, attention=mamba) if kind in MAMBA else layer
            for layer, kind in zip(decoder.layers, kinds, strict=True)
        ),
    )


def _kinds(read: parts.ConfigReader, layers: int) -> list[str]:
    """What each layer has, by ``layer_types`` or its other name; Mamba in all by default."""
    named = "layer_types" in read.config
    key = "layer_types" if named else "layers_block_type"
    if read.config.get(key) is None:
        return [MAMBA[0]] * layers
    return read.layer_kinds(key, (*ATTENTION, *MAMBA), layers)
