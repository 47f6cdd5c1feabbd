"""Qwen 3.5 (Qwen team, 2026), its text part alone: as Qwen3-Next, with other projections."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily
from qlora_wgpu.families.parts.mlp import GatedMLP
from qlora_wgpu.families.parts.rope import without_sections
from qlora_wgpu.families.qwen3_next import compose_hybrid, read_silu

STORED_PREFIXES = (("model.", "model.language_model."),)


def compose(read: ConfigReader) -> Decoder:
    """Every layer has an MLP; a delta net has four projections of its input.

    Modules are called as ``AutoModelForCausalLM`` calls them, which makes the text part alone of
    models with images, too; their files have other names.
    """
    read = ConfigReader(without_sections(read.config))
    read = read.with_defaults(num_key_value_heads=4, head_dim=256)
    dimensions = Dimensions.read(read)
    mlp = GatedMLP(dimensions, read_silu(read))
    decoder = compose_hybrid(read, dimensions, [mlp] * dimensions.num_hidden_layers, fused=False)
    return replace(decoder, stored_prefixes=STORED_PREFIXES)


FAMILY = DecoderFamily(compose)
