"""Muse Glimmer (Meta, 2026): its language model, with gated attention and normalized embeddings."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts

# transformers' defaults.
DEFAULTS = {
    "vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968,
    "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "sliding_window": 2048,
}  # fmt: skip


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default every fourth layer, counted from the last, has full attention and no positions.

    The norms of layers are stored as weight - 1, the final one is not.
    """
    text = parts.text_config(read, "none").with_defaults(**DEFAULTS)
    dimensions = parts.Dimensions.read(text)
    norm = parts.RMSNorm(text.number("rms_norm_eps", 1e-5), offset=1.0)
    rope = parts.read_rope(text.config, dimensions.head_dim)
    attention = parts.read_attention(
        text,
        dimensions,
        rope,
        qk_norm=parts.PlainQKNorm(norm.eps, dimensions.head_dim),
        gate="gate_proj",
        scale=text.number("qk_scale_factor", 3.87) / dimensions.head_dim**0.5,
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(text, key="hidden_activation"))
    post_norm = replace(norm, eps=text.number("post_norm_eps", 1e-8))
    count = dimensions.num_hidden_layers
    slides = [(count - 1 - i) % 4 != 0 for i in range(count)]
    places = zip(parts.layer_windows(text, slides), _rotated(text, slides), strict=True)
    layers = [
        parts.Layer(
            norm,
            replace(attention, window=window, rope=rope if turns else None),
            mlp,
            parts.PRE_AND_POST_NORM,
            post_norm=post_norm,
        )
        for window, turns in places
    ]
    decoder = parts.read_decoder(
        text,
        replace(norm, as_stored=True),
        layers,
        embedding_norm=norm.eps,
        norms_within=True,
        logit_scale=text.number("output_multiplier", 0.19611613513818404),
        logit_softcap=text.softcap("final_logit_softcapping", 20.0),
    )
    tied = read.flag("tie_word_embeddings")  # the text part's own key is ignored
    return replace(decoder, tied=tied).within(parts.LANGUAGE_MODEL)


def _rotated(read: parts.ConfigReader, by_default: list[bool]) -> list[bool]:
    """The layers with positions: ``layer_rope_theta`` is 0 for the others.

    All rotate by the common base, whatever numbers the list has, as in transformers.
    """
    thetas = read.config.get("layer_rope_theta")
    if thetas is None:
        return by_default
    if (
        not isinstance(thetas, list)
        or len(thetas) != len(by_default)
        or any(type(theta) not in (int, float) for theta in thetas)
    ):
        raise UnsupportedModelError(
            f"config.json: layer_rope_theta must have a number for each of the "
            f"{len(by_default)} layers, got {brief(thetas)}"
        )
    return [theta != 0 for theta in thetas]
