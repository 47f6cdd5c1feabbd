"""OLMo Hybrid (Ai2, 2026): gated delta nets with pre-norms, OLMo 3's attention with post-norms."""

from collections.abc import Mapping

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts

KINDS = ("linear_attention", "full_attention")
STORED_NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
THETA = 10_000.0
NORM_EPS = 1e-5
"""Of the norm of delta nets' heads, independent of config.json."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Attention has no positions if ``rope_theta`` is null."""
    dimensions = parts.Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-6)
    attention = parts.read_attention(
        read, dimensions, _rope(read, dimensions), qk_norm=parts.QKNorm(eps, per_head=False)
    )
    read.choice("hidden_act", ("silu", "swish"), "silu")
    delta_net = parts.SeparateDeltaNet(
        dimensions,
        _heads(read, dimensions),
        read.integer("linear_conv_kernel_dim", 4),
        NORM_EPS,
        fused=False,
        largest=2.0 if read.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    mlp, norm = parts.GatedMLP(dimensions, parts.read_activation(read)), parts.RMSNorm(eps)
    layers = [
        parts.Layer(norm, attention, mlp, parts.POST_NORM)
        if attends
        else parts.Layer(norm, delta_net, mlp)
        for attends in _attending(read, dimensions.num_hidden_layers)
    ]
    prefixes = [pair for i in range(len(layers)) for pair in _renamed(f"model.layers.{i}.")]
    return parts.read_decoder(
        read,
        norm,
        layers,
        pad_token_id=100_277,
        stored_prefixes=(*prefixes, ("model.", "")),
    )


def _renamed(at: str) -> list[tuple[str, str]]:
    """The names of a layer's norms, and those in files."""
    return [(f"{at}{own}.", f"{at}{stored}.") for own, stored in STORED_NORMS.items()]


def _rope(read: parts.ConfigReader, dimensions: parts.Dimensions) -> parts.Rope | None:
    given = read.config.get("rope_scaling") or read.config.get("rope_parameters")
    own = given if isinstance(given, Mapping) else {}
    if own.get("rope_theta", read.config.get("rope_theta", THETA)) is None:
        return None
    return parts.read_rope(read.config, dimensions.head_dim, default_theta=THETA)


def _heads(read: parts.ConfigReader, dimensions: parts.Dimensions) -> parts.DeltaHeads:
    heads = dimensions.num_attention_heads
    key_heads = read.integer("linear_num_key_heads", heads)
    key_dim = read.integer("linear_key_head_dim", int(0.75 * dimensions.hidden_size / key_heads))
    usual = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }
    given = {key: value for key, value in read.config.items() if value is not None}
    return parts.DeltaHeads.read(parts.ConfigReader({**usual, **given}))


def _attending(read: parts.ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has attention: by default every fourth one, or only the last of fewer."""
    types = read.config.get("layer_types")
    if types is None:
        return [i % 4 == 3 or i == layers - 1 < 3 for i in range(layers)]
    if not parts.name_kinds(types, KINDS, layers) or set(types) != set(KINDS):
        raise UnsupportedModelError(
            f"config.json: layer_types must name {' or '.join(KINDS)} for each of the "
            f"{layers} layers, and both kinds, got {brief(types)}"
        )
    return [kind == "full_attention" for kind in types]
