"""How long a text a model was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.families.config_reader import ConfigReader, is_above_zero


def longest_text(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest text that a config.json says the model was made for, if it does.

    Where RoPE is stretched, by its factor: of some models ``max_position_embeddings`` is what they
    were trained on before that, of others after it.

    Raises:
        UnsupportedModelError: If what it says is no positive integer.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    positions = ConfigReader(text).optional_integer("max_position_embeddings")
    return None if positions is None else max(positions, _stretched(positions, text))


def _stretched(positions: int, config: Mapping[str, Any]) -> int:
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not is_above_zero(factor := rope.get("factor")):
        return positions
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    before = rope.get("original_max_position_embeddings")
    return int(before * factor) if kind == "yarn" and is_above_zero(before) else positions
