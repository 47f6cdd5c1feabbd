"""Qwen 3.5 (Qwen team, 2026), text only: as Qwen3-Next, with other projections."""

from dataclasses import replace

from qlora_wgpu.families import parts
from qlora_wgpu.families.qwen3_next import compose_hybrid, read_silu

STORED_PREFIXES = (("model.", "model.language_model."),)


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer has an MLP; a delta net has four projections of its input.

    Modules have the names of ``AutoModelForCausalLM``, which also loads only the text part of
    models with images; their files have other names.
    """
    read = parts.ConfigReader(parts.without_sections(read.config))
    read = read.with_defaults(num_key_value_heads=4, head_dim=256)
    dimensions = parts.Dimensions.read(read)
    mlp = parts.GatedMLP(dimensions, read_silu(read))
    decoder = compose_hybrid(read, dimensions, [mlp] * dimensions.num_hidden_layers, fused=False)
    return replace(decoder, stored_prefixes=STORED_PREFIXES)
