"""Typed access to a config.json, with errors that name the key, and a decoder's dimensions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.family import Weights
from qlora_wgpu.limits import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LINEARS,
    MATRIX_ELEMENTS,
    NUMBERS,
    PARAMETERS,
    TAPS,
    VOCABULARY,
    WIDTH,
)


def check_sizes(weights: Weights, embedding: int) -> None:
    sizes = [spec.out_features * spec.in_features for spec in weights.linears]
    stacks = {spec.name: spec.out_features * spec.in_features for spec in weights.experts}
    count = len(sizes) + sum(spec.experts for spec in weights.experts)
    if count > LINEARS:
        raise UnsupportedModelError(
            f"config.json: {count:,} matrices of layers and experts are not supported (at most "
            f"{LINEARS:,})"
        )
    tables = [rows * columns for rows, columns in weights.tables.values()]
    largest = max([embedding, *tables, *sizes, *stacks.values()])
    if largest > MATRIX_ELEMENTS:
        raise UnsupportedModelError(
            f"config.json: a matrix of {largest:,} elements is not supported (at most "
            f"{MATRIX_ELEMENTS:,})"
        )
    total = embedding + sum(sizes) + sum(tables)
    total += sum(spec.experts * stacks[spec.name] for spec in weights.experts)
    if total > PARAMETERS:
        raise UnsupportedModelError(
            f"config.json: {total:,} parameters are not supported (at most {PARAMETERS:,})"
        )


_MOST = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "depth": LAYERS,
    "embed_dim": WIDTH,
    "num_heads": HEADS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM // 2,
    "qk_rope_head_dim": HEAD_DIM // 2,
    "v_head_dim": HEAD_DIM,
    "q_lora_rank": WIDTH,
    "kv_lora_rank": WIDTH,
    "vocab_size": VOCABULARY,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_conv_kernel_dim": TAPS,
    "mamba_n_heads": HEADS,
    "mamba_d_head": HEAD_DIM,
    "mamba_n_groups": HEADS,
    "mamba_d_state": HEAD_DIM,
    "mamba_d_conv": TAPS,
    "mamba_expand": TAPS,
    "moe_num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
}
_MOST_OF_ANY = 2**31 - 1  # the kernels' integers


def is_above_zero(value: Any) -> TypeGuard[float]:
    """Whether a value is a positive number well within float32's range."""
    least, most = NUMBERS
    return type(value) in (int, float) and least <= value <= most


def read_block_types(
    read: ConfigReader, kinds: Collection[str], legacy: Mapping[str, str]
) -> list[str] | None:
    """``layer_types``, or its older name ``layers_block_type``; None if config.json has neither.

    They say how many layers there are: ``num_hidden_layers`` has no effect.
    """
    key = "layer_types" if "layer_types" in read.config else "layers_block_type"
    named = read.config.get(key)
    if key == "layers_block_type" and named is None:
        return None
    found = [legacy.get(str(kind), str(kind)) for kind in named] if isinstance(named, list) else []
    if not found or not set(found) <= set(kinds):
        raise UnsupportedModelError(
            f"config.json: {key} must be a list of {' and '.join(kinds)}, got {brief(named)}"
        )
    return found


def name_kinds(types: Any, kinds: tuple[str, ...], layers: int) -> bool:
    is_whole = isinstance(types, list) and len(types) == layers
    return is_whole and all(isinstance(kind, str) and kind in kinds for kind in types)


class ConfigReader:
    """Typed access to a config.json, with errors that name the key.

    Attributes:
        config: The parsed file.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """This file with defaults for missing keys; a null stays null."""
        return ConfigReader({**defaults, **self.config})

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; ``default`` if the key is missing or null."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(
                f"config.json: {key} must be a positive integer, got {brief(value)}"
            )
        most = _MOST.get(key, _MOST_OF_ANY)
        if value > most:
            raise UnsupportedModelError(
                f"config.json: {key} must be at most {most:,}, got {brief(value)}"
            )
        return value

    def count(self, key: str, default: int) -> int:
        """A non-negative integer; ``default`` if the key is missing or null."""
        value = self.config.get(key)
        value = default if value is None else value
        return 0 if type(value) is int and value == 0 else self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedModelError(f"config.json: {key} must be a number, got {brief(value)}")
        if value != 0 and not is_above_zero(value):
            least, most = NUMBERS
            raise UnsupportedModelError(
                f"config.json: {key} must be finite and not negative, 0 or from {least:g} to "
                f"{most:g}, got {brief(value)}"
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; ``default`` if the key is missing or null."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UnsupportedModelError(
                f"config.json: {key} must be true or false, got {brief(value)}"
            )
        return value

    def choice(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """One of the supported values; any other would train a wrong model."""
        value = self.config.get(key, default)
        if value not in allowed:
            supported = ", ".join(map(repr, allowed))
            raise UnsupportedModelError(
                f"config.json: {key} = {brief(value)} is not supported (supported: {supported})"
            )
        return value

    def layer_kinds(self, key: str, kinds: tuple[str, ...], layers: int) -> list[str]:
        types: Any = self.config.get(key)
        if not name_kinds(types, kinds, layers):
            raise UnsupportedModelError(
                f"config.json: {key} must name {' or '.join(kinds)} for each of the {layers} layers"
            )
        return list(types)

    def renamed(self, key: str, other: str) -> ConfigReader:
        """This file with the value of ``other`` under ``key``."""
        if other not in self.config:
            return self
        if key in self.config and self.config[key] != self.config[other]:
            raise UnsupportedModelError(
                f"config.json: {key} {brief(self.config[key])} and {other} "
                f"{brief(self.config[other])} mean the same, but differ"
            )
        return ConfigReader({**self.config, key: self.config[other]})

    def optional_integer(self, key: str) -> int | None:
        """A positive integer; None if the key is missing or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def softcap(self, key: str, default: float | None = None) -> float | None:
        """A positive finite number, or None if it is null."""
        value = self.config.get(key, default)
        if value is None:
            return None
        if not is_above_zero(value):
            raise UnsupportedModelError(
                f"config.json: {key} must be a positive number or null, got {brief(value)}"
            )
        return float(value)

    def no_dropout(self, *keys: str) -> None:
        for key in keys:
            self.choice(key, (0, 0.0, None))

    def dropped(self, dropouts: Mapping[str, float]) -> tuple[str, ...]:
        """Notes on nonzero dropouts, which training ignores."""
        values = {key: self.number(key, default) for key, default in dropouts.items()}
        return tuple(
            f"config.json: {key} = {value} is ignored in training"
            for key, value in values.items()
            if value
        )


def text_config(read: ConfigReader, alone: str = "", *, ties: bool = True) -> ConfigReader:
    """The config.json of a multimodal model's text part.

    ``alone`` names the model type of the text part by itself, if it is another one. Without
    ``ties`` the outer configuration may tie the head to the embedding, which is off by default.
    """
    model_type, text = read.config.get("model_type"), read.config.get("text_config")
    if not isinstance(text, Mapping):
        alone = alone or f"'{model_type}_text'"
        raise UnsupportedModelError(
            f"config.json: model_type '{model_type}' requires a text_config (text only: {alone})"
        )
    if ties:
        return ConfigReader(text)
    key = "tie_word_embeddings"
    tied = next((c[key] for c in (text, read.config) if c.get(key) is not None), False)
    return ConfigReader({**text, key: tied})


def padding_idx(config: Mapping[str, Any], rows: int, default: int | None) -> int | None:
    """The row of ``pad_token_id``, which counts from the end if negative.

    For a multimodal model it is that of the text part.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    row = text.get("pad_token_id", default)
    return row % rows if type(row) is int and -rows <= row < rows else None


def longest_text(config: Mapping[str, Any]) -> int | None:
    """The maximum sequence length by config.json, if it is given.

    If RoPE is scaled, this includes its factor: for some models ``max_position_embeddings`` is the
    length before scaling, for others after it.
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


@dataclass(frozen=True)
class Dimensions:
    """A decoder's dimensions, by Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def read(cls, read: ConfigReader, head_dim: int | None = None) -> Dimensions:
        hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        dimensions = cls(
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_dim=read.integer("head_dim", head_dim or hidden_size // heads),
            hidden_size=hidden_size,
            num_attention_heads=heads,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            vocab_size=read.integer("vocab_size"),
        )
        if heads % dimensions.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {heads} must be a multiple of "
                f"num_key_value_heads {dimensions.num_key_value_heads}"
            )
        if dimensions.head_dim % 2:
            raise UnsupportedModelError(f"config.json: head_dim {dimensions.head_dim} must be even")
        return dimensions

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim
