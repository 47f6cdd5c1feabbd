"""Qwen3-VL as a mixture of experts (Qwen team, 2025): its language model, a Qwen 3 mixture."""

from dataclasses import replace

from qlora_wgpu.families import parts, qwen3_moe


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The whole model's config ties embedding and head."""
    text = parts.text_config(read)
    fixed = {"use_sliding_window": False, "norm_topk_prob": True}
    part = parts.ConfigReader({**parts.without_sections(text.config), **fixed}).with_defaults(
        num_key_value_heads=16, rope_theta=500_000.0, num_experts_per_tok=4,
        moe_intermediate_size=1408,
    )  # fmt: skip
    if "num_local_experts" not in part.config:
        part = part.with_defaults(num_experts=60)
    decoder = replace(qwen3_moe.compose(part), tied=read.flag("tie_word_embeddings", False))
    return decoder.within(parts.LANGUAGE_MODEL)
