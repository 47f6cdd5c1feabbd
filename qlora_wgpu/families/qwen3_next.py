"""Qwen3-Next (Qwen team, 2025): gated delta nets in most layers, gated attention in the others."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.qwen2_moe import read_experts

SHARE = 0.25  # of a head that is rotated, by default
SILU = ("silu", "swish")
SIZES = (512, 512)  # rows of an expert's gate, and of the shared one's
KINDS = ("linear_attention", "full_attention")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """A delta net's projections are two layers, whose columns are grouped by head."""
    read = read.with_defaults(num_key_value_heads=2, head_dim=256, intermediate_size=5632)
    dimensions = parts.Dimensions.read(read)
    layers = dimensions.num_hidden_layers
    dense = parts.GatedMLP(dimensions, read_silu(read))
    mlps: list[parts.Half] = [dense] * layers
    if read.config.get("num_experts") != 0:
        normalized = read.flag("norm_topk_prob", True)
        experts = read_experts(
            read, dimensions, dense.activation, (512, 10), SIZES, normalized=normalized
        )
        mlps = [experts if sparse else dense for sparse in parts.sparse_layers(read, layers)]
    decoder = compose_hybrid(read, dimensions, mlps, fused=True)
    return replace(decoder, balance=parts.read_balance_loss(read))


def compose_hybrid(
    read: parts.ConfigReader, dimensions: parts.Dimensions, mlps: list[parts.Half], *, fused: bool
) -> parts.Decoder:
    eps = read.number("rms_norm_eps", 1e-6)
    norm = parts.RMSNorm(eps, offset=1.0)
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_partial=SHARE),
        qk_norm=parts.QKNorm(eps),
        gated=True,
    )
    taps = read.integer("linear_conv_kernel_dim", 4)
    delta_net = parts.GatedDeltaNet(dimensions, parts.DeltaHeads.read(read), taps, eps, fused)
    kinds = _attending(read, dimensions.num_hidden_layers)
    layers = [
        parts.Layer(norm, attention if attends else delta_net, mlp)
        for attends, mlp in zip(kinds, mlps, strict=True)
    ]
    return parts.read_decoder(read, norm, layers)


def read_silu(read: parts.ConfigReader) -> str:
    """``hidden_act``, which must be SiLU: delta nets' convolution and norm support nothing else.

    Attention always has its gate, as in published files.
    """
    read.choice("hidden_act", SILU, "silu")
    read.choice("output_gate_type", (None, *SILU))
    read.choice("attn_output_gate", (None, True))
    return parts.read_activation(read)


def _attending(read: parts.ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has attention, by ``layer_types`` or ``full_attention_interval``."""
    types = read.config.get("layer_types")
    if types is None:
        interval = read.integer("full_attention_interval", 4)
        return [(i + 1) % interval == 0 for i in range(layers)]
    if not parts.name_kinds(types, KINDS, layers):
        raise UnsupportedModelError(
            f"config.json: layer_types must name {' or '.join(KINDS)} for each of the "
            f"{layers} layers, got {brief(types)}"
        )
    return [kind == "full_attention" for kind in types]
