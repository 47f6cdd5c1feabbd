"""Towers that several models have, read from the ``vision_config`` of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.connectors import DeepStack, Projector, StandardizedProjector
from qlora_wgpu.families.parts.mlp import GatedMLP, PlainMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm, Norm, RMSNorm
from qlora_wgpu.families.parts.vision import (
    AxialRope,
    Connector,
    FloatArray,
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    TowerMatrix,
    VisionTower,
)
from qlora_wgpu.families.parts.vision_positions import (
    AxialPositions,
    BilinearPositions,
    FixedPositions,
    FractionalPositions,
)
from qlora_wgpu.graph.tensor import ROW_UNIT

TOWER_PREFIXES = (
    ("model.vision_tower.", "vision_tower."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.vision_tower.", "model.vision_tower.vision_model."),
    ("model.", ""),
)
"""Names in the files of most models: older ones have all of the tower below ``vision_model``."""
SIGLIP, SIGLIP2, CLIP, PIXTRAL = (
    "siglip_vision_model", "siglip2_vision_model", "clip_vision_model", "pixtral",
)  # fmt: skip


def vision_config(read: ConfigReader, kind: str, *others: str) -> tuple[ConfigReader, str]:
    """The ``vision_config``, and its model_type: ``kind`` by default, or one of ``others``."""
    vision = read.config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise UnsupportedModelError(
            f"config.json: images require a vision_config, got {brief(vision)}"
        )
    part = ConfigReader(vision)
    return part, part.choice("model_type", (kind, *others), kind)


def text_size(read: ConfigReader, default: int = 4096) -> int:
    """The hidden_size of the language model."""
    text = read.config.get("text_config")
    return ConfigReader(text if isinstance(text, Mapping) else {}).integer("hidden_size", default)


def channels(read: ConfigReader, key: str = "num_channels") -> int:
    """Three, as image processors make them."""
    count: int = read.choice(key, (3,), 3)
    return count


def head_size(hidden_size: int, heads: int, multiple: int = 2) -> int:
    if hidden_size % heads or hidden_size // heads % multiple or hidden_size % ROW_UNIT:
        raise UnsupportedModelError(
            f"config.json: vision_config: {heads} heads of a hidden_size of {hidden_size} are not "
            f"supported (hidden_size a multiple of {ROW_UNIT}, heads of a multiple of {multiple})"
        )
    return hidden_size // heads


def tower_sizes(hidden_size: int, intermediate_size: int, layers: int, heads: int) -> Dimensions:
    """The dimensions that parts of a layer read."""
    head_dim = head_size(hidden_size, heads)
    return Dimensions(hidden_size, intermediate_size, layers, heads, heads, head_dim, 1)


def selected_layers(read: ConfigReader, layers: int, default: int) -> tuple[int, ...]:
    """``vision_feature_layer`` as numbers of layers before the hidden states."""
    value = read.config.get("vision_feature_layer", default)
    given = value if isinstance(value, list) else [value]
    if not given or any(type(i) is not int or not -layers - 1 <= i <= layers for i in given):
        raise UnsupportedModelError(
            f"config.json: vision_feature_layer must be from {-layers - 1} to {layers}, or a list "
            f"of such integers, got {brief(value)}"
        )
    return tuple(i if i >= 0 else layers + 1 + i for i in given)


# ---- SigLIP and CLIP -----------------------------------------------------------------------------


def _plain_layers(read: ConfigReader, layers: int, eps: float, hidden_act: str) -> list[TowerLayer]:
    hidden_size, heads = read.integer("hidden_size", 768), read.integer("num_attention_heads", 12)
    norm = LayerNorm(read.number("layer_norm_eps", eps), bias=True)
    of = tower_sizes(hidden_size, read.integer("intermediate_size", 3072), layers, heads)
    mlp = PlainMLP(of, read_activation(read, hidden_act), True, ("fc1", "fc2"))
    return [TowerLayer(norm, TowerAttention(hidden_size, heads), mlp)] * layers


def read_siglip(
    read: ConfigReader,
    at: str,
    connector: Connector,
    *,
    fractional: bool = False,
    patch_size: int = 16,
    **more: Any,
) -> VisionTower:
    """A SigLIP, whose positions are those of one size, or taken by fractions of the image.

    ``fractional`` chooses the latter; ``more`` are further fields of the tower.
    """
    layers = read.integer("num_hidden_layers", 12)
    patch, image = read.integer("patch_size", patch_size), read.integer("image_size", 224)
    kind = FractionalPositions if fractional else FixedPositions
    name, size = f"{at}embeddings.patch_embedding", read.integer("hidden_size", 768)
    table = f"{at}embeddings.position_embedding.weight"
    norm = LayerNorm(read.number("layer_norm_eps", 1e-6), bias=True)
    fields = {"last_norm": (f"{at}post_layernorm", norm), **more}
    return VisionTower(
        PatchEmbedding(name, size, patch, channels(read)),
        tuple(_plain_layers(read, layers, 1e-6, "gelu_pytorch_tanh")),
        connector,
        f"{at}encoder.layers.",
        positions=kind(table, image // patch, size),
        **fields,
    )


def read_siglip2(read: ConfigReader, at: str, connector: Connector, **more: Any) -> VisionTower:
    """A SigLIP 2 of images of any aspect ratio, whose positions are resized."""
    layers, patch = read.integer("num_hidden_layers", 12), read.integer("patch_size", 16)
    name, size = f"{at}embeddings.patch_embedding", read.integer("hidden_size", 768)
    side = int(read.integer("num_patches", 256) ** 0.5)
    table = f"{at}embeddings.position_embedding.weight"
    norm = LayerNorm(read.number("layer_norm_eps", 1e-6), bias=True)
    return VisionTower(
        PatchEmbedding(name, size, patch, channels(read), channels_last=True),
        tuple(_plain_layers(read, layers, 1e-6, "gelu_pytorch_tanh")),
        connector,
        f"{at}encoder.layers.",
        positions=BilinearPositions(table, side, size, antialias=True),
        last_norm=(f"{at}post_layernorm", norm),
        **more,
    )


def read_clip(read: ConfigReader, at: str, connector: Connector, **more: Any) -> VisionTower:
    """A CLIP, whose class token is the first row of a crop."""
    layers, patch = read.integer("num_hidden_layers", 12), read.integer("patch_size", 32)
    name, size = f"{at}embeddings.patch_embedding", read.integer("hidden_size", 768)
    side = read.integer("image_size", 224) // patch
    norm = LayerNorm(read.number("layer_norm_eps", 1e-5), bias=True)
    table = f"{at}embeddings.position_embedding.weight"
    positions = FixedPositions(table, side, size, f"{at}embeddings.class_embedding")
    return VisionTower(
        PatchEmbedding(name, size, patch, channels(read), bias=False),
        tuple(_plain_layers(read, layers, 1e-5, "quick_gelu")),
        connector,
        f"{at}encoder.layers.",
        positions=positions,
        first_norm=(f"{at}pre_layrnorm", norm),
        class_token=True,
        **more,
    )


# ---- models with them ----------------------------------------------------------------------------


def read_shuffling_siglip(read: ConfigReader, vision: ConfigReader) -> VisionTower:
    """The tower of Idefics 3 and SmolVLM: merged patches through one layer."""
    vision = vision.with_defaults(hidden_size=1152, num_attention_heads=16)
    merge, size = read.integer("scale_factor", 2), vision.integer("hidden_size")
    name = "model.connector.modality_projection.proj"
    layer = layer_of(name, text_size(read), merge**2 * size, bias=False)
    return read_siglip(
        vision, "model.vision_model.", Projector((layer,), merge=merge), fractional=True,
        patch_size=32, merge=merge,
    )  # fmt: skip


def read_llava_tower(read: ConfigReader) -> VisionTower:
    """The tower of LLaVA and LLaVA-NeXT: the hidden states of one or several layers in an MLP."""
    vision, kind = vision_config(read, CLIP, SIGLIP)
    layers, size = vision.integer("num_hidden_layers", 12), vision.integer("hidden_size", 768)
    selected = selected_layers(read, layers, -2)
    strategy = read.choice("vision_feature_select_strategy", ("default", "full"), "default")
    bias, out = read.flag("multimodal_projector_bias", True), text_size(read)
    at = "model.multi_modal_projector."
    whole = layer_of(f"{at}linear_1", out, len(selected) * size, bias=bias)
    parts = [
        replace(
            whole, name=f"{whole.name}.{i}" if i else whole.name, in_features=size,
            bias="" if i else whole.bias, make=partial(_columns, i * size, size),
        )
        for i in range(len(selected))
    ]  # fmt: skip
    projector = Projector(
        (parts[0], layer_of(f"{at}linear_2", out, out, bias=bias)),
        read_activation(read, "gelu", "projector_hidden_act"),
        further=tuple(parts[1:]),
    )
    reader = read_clip if kind == CLIP else read_siglip
    return reader(
        vision, "model.vision_tower.", projector, last_norm=None, selected=selected,
        skip=int(strategy == "default"), stored_prefixes=TOWER_PREFIXES,
    )  # fmt: skip


def _columns(first: int, count: int, array: FloatArray) -> FloatArray:
    return array[:, first : first + count]


def transposed(array: FloatArray) -> FloatArray:
    return array.T


def channels_inside(count: int, array: FloatArray) -> FloatArray:
    """Columns by (patch, channel) of columns by (channel, one of ``count`` patches)."""
    return array.reshape(len(array), -1, count).transpose(0, 2, 1).reshape(len(array), -1)


# ---- towers with rotary positions ----------------------------------------------------------------


def read_axial_rope(read: ConfigReader, head_dim: int, *, alternate: bool = False) -> AxialRope:
    """``rope_parameters``, or ``rope_theta``, of a tower."""
    given = read.config.get("rope_parameters")
    own = ConfigReader(given if isinstance(given, Mapping) else {})
    own.choice("rope_type", ("axial", "default"), "axial")
    theta = own.number("rope_theta", read.number("rope_theta", 10_000.0))
    return AxialRope(head_dim, theta, alternate)


def read_pixtral(read: ConfigReader, at: str, connector: Connector, **more: Any) -> VisionTower:
    """A Pixtral: RMSNorm, gated MLPs and rotary positions, for images of any size."""
    size, heads = read.integer("hidden_size", 1024), read.integer("num_attention_heads", 16)
    layers = read.integer("num_hidden_layers", 24)
    of = tower_sizes(size, read.integer("intermediate_size", 4096), layers, heads)
    norm: Norm = RMSNorm(1e-5)
    names = tuple(f"attention.{leaf}_proj" for leaf in "qkvo")
    attention = TowerAttention(size, heads, False, names[:3], names[3])
    mlp = GatedMLP(of, read_activation(read, "gelu"), name="feed_forward")
    layer = TowerLayer(norm, attention, mlp, ("attention_norm", "ffn_norm"))
    patch = PatchEmbedding(
        f"{at}patch_conv", size, read.integer("patch_size", 16), channels(read),
        bias=False,
    )  # fmt: skip
    head_dim = head_size(size, heads, 4)
    read.choice("head_dim", (head_dim, None))
    rope = read_axial_rope(read, head_dim, alternate=True)
    return VisionTower(
        patch, (layer,) * layers, connector, f"{at}transformer.layers.", rope=rope,
        first_norm=(f"{at}ln_pre", norm), **more,
    )  # fmt: skip


def layer_of(name: str, rows: int, columns: int, *, bias: bool = True) -> TowerMatrix:
    return TowerMatrix.of(LinearSpec(name, rows, columns, bias))


@dataclass(frozen=True)
class QwenNames:
    """What differs between Qwen's towers."""

    norm: Norm
    mlp: PlainMLP | GatedMLP
    size: int  # columns of the hidden states
    out_features: int  # of the features
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")


def read_qwen_tower(read: ConfigReader, of: QwenNames, **more: Any) -> VisionTower:
    """The tower of Qwen2-VL and its successors, for images of any size."""
    at, depth, heads = "model.visual.", read.integer("depth", 32), read.integer("num_heads", 16)
    merge, head_dim = read.integer("spatial_merge_size", 2), head_size(of.size, heads, 4)
    embedding = PatchEmbedding(
        f"{at}patch_embed.proj", of.size, read.integer("patch_size", 14),
        channels(read, "in_channels"), more.pop("patch_bias", False),
        read.integer("temporal_patch_size", 2),
    )  # fmt: skip
    attention = TowerAttention(of.size, heads, True, ("attn.qkv",), "attn.proj")
    layer = TowerLayer(of.norm, attention, of.mlp, ("norm1", "norm2"))
    last = qwen_merger(f"{at}merger.", of, merge)
    others = tuple(
        qwen_merger(f"{at}deepstack_merger_list.{i}.", of, merge, merged=True)
        for i in range(len(more.get("selected", ())))
    )
    selected = (depth, *(i + 1 for i in more.pop("selected", ())))
    return VisionTower(
        embedding, (layer,) * depth, DeepStack(last, others), f"{at}blocks.",
        (("model.visual.", "visual."),), rope=read_axial_rope(read, head_dim), merge=merge,
        selected=selected, has_grid=True, **more,
    )  # fmt: skip


def qwen_merger(at: str, of: QwenNames, merge: int, *, merged: bool = False) -> Projector:
    """Two layers of merged patches, normalized before they are merged, or after."""
    wide, (name, first, second) = merge**2 * of.size, of.merger
    norm = f"{at}{name}", of.norm, wide if merged else of.size
    layers = (
        layer_of(f"{at}{first}", wide, wide),
        layer_of(f"{at}{second}", of.out_features, wide),
    )
    before, after = (None, norm) if merged else (norm, None)
    return Projector(layers, "gelu", merge, before, after)


# ---- Gemma 4 -------------------------------------------------------------------------------------


def read_gemma4_tower(read: ConfigReader, vision: ConfigReader) -> VisionTower:
    """The tower of Gemma 4, for images of any size: norms before and after, and of heads."""
    size, heads = vision.integer("hidden_size", 768), vision.integer("num_attention_heads", 12)
    layers = vision.integer("num_hidden_layers", 16)
    inner = vision.integer("intermediate_size", 3072)
    head_dim = head_size(size, heads, 4)
    vision.choice("head_dim", (head_dim,), 64)
    vision.choice("num_key_value_heads", (heads,), 12)
    vision.choice("attention_bias", (False, None), False)
    vision.no_dropout("attention_dropout")
    eps, clamps = vision.number("rms_norm_eps", 1e-6), vision.flag("use_clipped_linears", False)
    q, k, v, o = (f"self_attn.{leaf}_proj.linear" for leaf in "qkvo")
    layer = TowerLayer(
        RMSNorm(eps),
        TowerAttention(size, heads, False, (q, k, v), o, scale=1.0, head_norm=eps, by_halves=True),
        GatedMLP(
            tower_sizes(size, inner, layers, heads),
            read_activation(vision, "gelu_pytorch_tanh", "hidden_activation"),
            leaves=("gate_proj.linear", "up_proj.linear", "down_proj.linear"),
        ),
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        clamps,
    )
    at, merge = "model.vision_tower.", vision.integer("pooling_kernel_size", 3)
    statistics = (f"{at}std_bias", f"{at}std_scale") if vision.flag("standardize", False) else None
    out = layer_of(
        "model.embed_vision.embedding_projection", text_size(read, 2304), size, bias=False
    )
    table = f"{at}patch_embedder.position_embedding_table"
    return VisionTower(
        PatchEmbedding(
            f"{at}patch_embedder.input_proj", size, vision.integer("patch_size", 16),
            bias=False, channels_last=True, centers=True,
        ),
        (layer,) * layers,
        StandardizedProjector(out, eps, merge, size**0.5, statistics),
        f"{at}encoder.layers.",
        (("model.", ""),),
        AxialPositions(table, vision.integer("position_embedding_size", 10_240), size),
        read_axial_rope(vision.with_defaults(rope_theta=100.0), head_dim),
        merge=merge,
    )  # fmt: skip
