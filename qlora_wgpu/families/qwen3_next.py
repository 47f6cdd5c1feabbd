"""Qwen3-Next (Qwen team, 2025): most layers a gated delta net, the others attention with a gate."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.parts.attention import Attention, QKNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Half, Layer
from qlora_wgpu.families.parts.mixers import DeltaHeads, GatedDeltaNet
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.moe import (
    Experts,
    SharedExpert,
    read_balance_loss,
    read_expert_counts,
    sparse_layers,
)
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope

SHARE = 0.25  # of a head that is rotated, where no key says it
SILU = ("silu", "swish")
KINDS = ("linear_attention", "full_attention")


def compose(read: ConfigReader) -> Decoder:
    """Projections of a delta net are two layers, in which each head's parts are together."""
    read = read.with_defaults(num_key_value_heads=2, head_dim=256, intermediate_size=5632)
    dimensions = Dimensions.read(read)
    layers = dimensions.num_hidden_layers
    dense: Half = GatedMLP(dimensions, read_silu(read))
    mlps = [dense] * layers
    if read.config.get("num_experts") != 0:
        experts = read_experts(
            read, dimensions, (512, 10), normalized=read.flag("norm_topk_prob", True)
        )
        mlps = [experts if sparse else dense for sparse in sparse_layers(read, layers)]
    decoder = compose_hybrid(read, dimensions, mlps, fused=True)
    return replace(decoder, balance=read_balance_loss(read))


def compose_hybrid(
    read: ConfigReader, dimensions: Dimensions, mlps: list[Half], *, fused: bool
) -> Decoder:
    """A decoder of delta nets and gated attention.

    Args:
        read: The config.json of the text part.
        dimensions: The decoder's sizes.
        mlps: The second half of each layer.
        fused: Whether a delta net's projections are two layers instead of four.

    Raises:
        UnsupportedModelError: If it asks for what is not computed.
    """
    read.no_dropout("attention_dropout")
    eps, bias = read.number("rms_norm_eps", 1e-6), read.flag("attention_bias")
    norm = RMSNorm(eps, offset=1.0)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim, default_partial=SHARE),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(eps),
        gated=True,
    )
    taps = read.integer("linear_conv_kernel_dim", 4)
    delta_net = GatedDeltaNet(dimensions, DeltaHeads.read(read), taps, eps, fused)
    kinds = _attending(read, dimensions.num_hidden_layers)
    return Decoder(
        dimensions,
        norm,
        layers=tuple(
            Layer(norm, attention if attends else delta_net, mlp)
            for attends, mlp in zip(kinds, mlps, strict=True)
        ),
        tied=read.flag("tie_word_embeddings"),
    )


def read_experts(
    read: ConfigReader, dimensions: Dimensions, defaults: tuple[int, int], *, normalized: bool
) -> Experts:
    """A mixture with a shared expert and its gate.

    Args:
        read: The config.json of the text part.
        dimensions: The decoder's sizes.
        defaults: Experts, and how many a token meets, where no key says it.
        normalized: Whether the weights of those that a token meets sum up to one.

    Raises:
        UnsupportedModelError: If it asks for what is not computed.
    """
    activation = read_silu(read)
    num_experts, num_experts_per_tok = read_expert_counts(read, *defaults)
    shared = replace(
        dimensions, intermediate_size=read.integer("shared_expert_intermediate_size", 512)
    )
    return Experts(
        dimensions.hidden_size,
        read.integer("moe_intermediate_size", 512),
        activation,
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=normalized,
        shared=SharedExpert(
            GatedMLP(shared, activation, name="mlp.shared_expert"), gate="mlp.shared_expert_gate"
        ),
    )


def read_silu(read: ConfigReader) -> str:
    """``hidden_act``, by which a delta net's convolution goes, too: it has SiLU alone.

    So has its norm, and what attention makes always has its gate, as published files say.
    """
    read.choice("hidden_act", SILU, "silu")
    read.choice("output_gate_type", (None, *SILU))
    read.choice("attn_output_gate", (None, True))
    return read_activation(read)


def _attending(read: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer attends, by ``layer_types`` or else ``full_attention_interval``."""
    types = read.config.get("layer_types")
    if types is None:
        interval = read.integer("full_attention_interval", 4)
        return [(i + 1) % interval == 0 for i in range(layers)]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in KINDS for kind in types)
    ):
        raise UnsupportedModelError(
            f"config.json: layer_types must name {' or '.join(KINDS)} for each of the "
            f"{layers} layers, got {brief(types)}"
        )
    return [kind == "full_attention" for kind in types]


FAMILY = DecoderFamily(compose)
