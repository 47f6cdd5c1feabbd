"""What families are put together from: ``from qlora_wgpu.families import parts``."""

from qlora_wgpu.families.parts.attention import (
    Attention,
    FusedQKV,
    QKLayerNorm,
    QKNorm,
    Windows,
    layer_windows,
    periodic_windows,
    upper_windows,
)
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions, is_above_zero, text_config
from qlora_wgpu.families.parts.decoder import (
    PARALLEL,
    POST_NORM,
    PRE_AND_POST_NORM,
    PRE_NORM,
    Decoder,
    DecoderFamily,
    Half,
    Layer,
    ResidualOrder,
)
from qlora_wgpu.families.parts.latent_attention import read_latent_attention
from qlora_wgpu.families.parts.mixers import DeltaHeads, GatedDeltaNet, ShortConv
from qlora_wgpu.families.parts.mlp import (
    XIELUMLP,
    FusedGatedMLP,
    GatedMLP,
    PlainMLP,
    read_activation,
)
from qlora_wgpu.families.parts.moe import (
    Experts,
    MixtureBeside,
    Router,
    Scoring,
    SharedExpert,
    check_expert_counts,
    read_balance_loss,
    read_clamped_glu,
    read_expert_counts,
    read_groups,
    refuse_balance_loss,
    sparse_layers,
)
from qlora_wgpu.families.parts.norm import LayerNorm, RMSNorm
from qlora_wgpu.families.parts.rope import (
    Growth,
    Rope,
    read_rope,
    read_ropes_of_layers,
    without_sections,
)
from qlora_wgpu.families.parts.shared_kv import PerLayerInputs, SharingDecoder, SharingLayer

__all__ = [
    "PARALLEL", "POST_NORM", "PRE_AND_POST_NORM", "PRE_NORM", "XIELUMLP", "Attention",
    "ConfigReader", "Decoder", "DecoderFamily", "DeltaHeads", "Dimensions", "Experts",
    "FusedGatedMLP", "FusedQKV", "GatedDeltaNet", "GatedMLP", "Growth", "Half", "Layer",
    "LayerNorm", "MixtureBeside", "PerLayerInputs", "PlainMLP", "QKLayerNorm", "QKNorm",
    "RMSNorm", "ResidualOrder", "Rope", "Router", "Scoring", "SharedExpert", "SharingDecoder",
    "SharingLayer", "ShortConv", "Windows", "check_expert_counts", "is_above_zero",
    "layer_windows", "periodic_windows", "read_activation", "read_balance_loss",
    "read_clamped_glu", "read_expert_counts", "read_groups", "read_latent_attention",
    "read_rope", "read_ropes_of_layers", "refuse_balance_loss", "sparse_layers", "text_config",
    "upper_windows", "without_sections",
]  # fmt: skip
