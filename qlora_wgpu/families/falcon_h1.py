"""Falcon-H1 (TII, 2025): attention and Mamba 2 side by side in every layer, with multipliers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.bamba import ORDER, SILU


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Both mixers read the same norm; the sum of their outputs is added to the residual stream."""
    read = read.with_defaults(num_key_value_heads=8, intermediate_size=14336, mamba_d_ssm=1024)
    dimensions = parts.Dimensions.read(read)
    # The convolution applies the MLP's activation, and supports SiLU alone.
    read.choice("hidden_act", SILU, "silu")
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    factors = {key: read.number(f"{key}_multiplier", 1.0) for key in _FACTORS}
    gate, down = _numbers(read, "mlp_multipliers", 2)
    bias = read.flag("mlp_bias")
    _refuse_biases("mlp_bias", bias, mlp_multipliers=(gate, down))
    mlp = parts.GatedMLP(
        dimensions, "silu", bias, name="feed_forward", gate_multiplier=gate, multiplier=down
    )
    layer = parts.Layer(norm, _mixers(read, dimensions, norm, factors), mlp, ORDER)
    multiplier = factors["embedding"]
    return parts.read_decoder(
        read,
        norm,
        layer,
        pad_token_id=0,
        final_norm="final_layernorm",
        embedding_scale=multiplier,
        noise_scale=multiplier,
        logit_scale=factors["lm_head"],
    )


_FACTORS = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")


def _mixers(
    read: parts.ConfigReader,
    dimensions: parts.Dimensions,
    norm: parts.RMSNorm,
    factors: Mapping[str, float],
) -> parts.ParallelMixers:
    inner_size = read.optional_integer("mamba_d_ssm")
    mamba = parts.read_mamba(read, dimensions, eps=norm.eps, inner_size=inner_size)
    # A null is false.
    before = read.with_defaults(mamba_norm_before_gate=True).flag("mamba_norm_before_gate")
    normed = read.flag("mamba_rms_norm")
    each = _numbers(read, "ssm_multipliers", 5)
    _refuse_biases("mamba_proj_bias", mamba.in_bias, ssm_in_multiplier=(factors["ssm_in"],))
    out_bias = read.flag("projectors_bias")
    _refuse_biases("projectors_bias", out_bias, ssm_out_multiplier=(factors["ssm_out"],))
    mamba = replace(
        mamba,
        gate="only" if not normed else "after" if before else "before",
        out_bias=out_bias,
        adapts_output=False,
        multipliers=tuple(factors["ssm_in"] * factor for factor in each),
    )
    # Factors of attention's input are those of its scores and its output.
    inside, scale = factors["attention_in"], dimensions.head_dim**-0.5 * factors["key"]
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.read_attention(read, dimensions, rope, scale=scale * inside * inside)
    outside = factors["attention_out"]
    _refuse_biases("attention_bias", attention.o_bias, attention_multipliers=(inside, outside))
    return parts.ParallelMixers(attention, mamba, outside * inside, factors["ssm_out"])


def _refuse_biases(key: str, bias: bool, **factors: tuple[float, ...]) -> None:
    for name, values in factors.items():
        if bias and any(value != 1.0 for value in values):
            raise UnsupportedModelError(f"config.json: {key} with {name} is not supported")


def _numbers(read: parts.ConfigReader, key: str, count: int) -> list[float]:
    values: Any = read.config.get(key)
    values = [1.0] * count if values is None else values
    if not isinstance(values, list) or len(values) != count:
        raise UnsupportedModelError(
            f"config.json: {key} must be {count} numbers, got {brief(values)}"
        )
    return [parts.ConfigReader({key: value}).number(key, 1.0) for value in values]
