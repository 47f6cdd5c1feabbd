"""GPT-NeoX-20B and Pythia (EleutherAI, 2022): parallel attention and MLP with own norms."""

from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Attention and MLP are sequential if ``use_parallel_residual`` is false."""
    dimensions = _dimensions(read)
    bias = read.flag("attention_bias", True)
    attention = parts.Attention(
        dimensions,
        _rope(read, dimensions.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        fused=parts.FusedQKV("query_key_value", by_head=True),
        name="attention",
        output="dense",
    )
    mlp = parts.PlainMLP(
        dimensions,
        parts.read_activation(read, "gelu"),
        bias=True,
        leaves=("dense_h_to_4h", "dense_4h_to_h"),
    )
    norm = parts.LayerNorm(read.number("layer_norm_eps", 1e-5), bias=True)
    order = replace(parts.PRE_NORM, parallel=read.flag("use_parallel_residual", True))
    return parts.Decoder(
        dimensions,
        norm,
        layers=(parts.Layer(norm, attention, mlp, order),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        prefix="gpt_neox.",
        # Files use the head's old name, from earlier versions of transformers.
        stored_prefixes=(("gpt_neox.", ""), ("lm_head.", "embed_out.")),
        embedding="embed_in",
        final_norm="final_layer_norm",
        pads=False,
        notes=read.dropped({"attention_dropout": 0.0, "hidden_dropout": 0.0}),
    )


def _dimensions(read: parts.ConfigReader) -> parts.Dimensions:
    """Every head has its own keys; ``num_key_value_heads`` is ignored."""
    hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if hidden_size % heads:
        raise UnsupportedModelError(
            f"config.json: hidden_size {hidden_size} must be a multiple of num_attention_heads "
            f"{heads}"
        )
    read.choice("head_dim", (None, hidden_size // heads))
    return parts.Dimensions.read(parts.ConfigReader({**read.config, "num_key_value_heads": heads}))


def _rope(read: parts.ConfigReader, head_dim: int) -> parts.Rope:
    """The family has its own keys for RoPE's base and partial factor."""
    own: dict[str, Any] = {
        "rope_theta": read.config.get("rotary_emb_base", 10_000.0),
        "partial_rotary_factor": read.config.get("rotary_pct", 0.25),
    }
    return parts.read_rope({**read.config, **own}, head_dim, default_partial=0.25)
