"""The embedding's row that gets no gradient where it is looked up: PyTorch's ``padding_idx``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What transformers 5.23 takes where config.json does not say it.
_DEFAULTS = {
    "apertus": 3, "cohere": 0, "cohere2": 0, "ernie4_5": 0, "ernie4_5_moe": 0, "gemma": 0,
    "gemma2": 0, "gemma3": 0, "gemma3_text": 0, "gemma4": 0, "gemma4_text": 0, "glm4": 151329,
    "hunyuan_v1_dense": 0, "lfm2": 0, "lfm2_moe": 0, "ministral3": 11, "olmo2": 1, "olmo3": 1,
    "olmoe": 1, "phi3": 32000, "seed_oss": 1, "smollm3": 128004,
}  # fmt: skip


def padding_idx(config: Mapping[str, Any], rows: int) -> int | None:
    """The row that ``pad_token_id`` names, of a model with images its text part's.

    One below zero counts from the end.

    Args:
        config: The contents of config.json.
        rows: Rows of the embedding.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    model_type = text.get("model_type") or config.get("model_type")
    default = _DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    row = text.get("pad_token_id", default)
    return row % rows if type(row) is int and -rows <= row < rows else None
