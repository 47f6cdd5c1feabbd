"""The embedding's row that gets no gradient where it is looked up: PyTorch's ``padding_idx``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def padding_idx(config: Mapping[str, Any], rows: int, default: int | None) -> int | None:
    """The row that ``pad_token_id`` names, of a model with images its text part's.

    One below zero counts from the end.

    Args:
        config: The contents of config.json.
        rows: Rows of the embedding.
        default: What Hugging Face takes where config.json does not say it.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    row = text.get("pad_token_id", default)
    return row % rows if type(row) is int and -rows <= row < rows else None
