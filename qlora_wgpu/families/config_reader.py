"""Typed access to a config.json, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.limits import EXPERTS, HEAD_DIM, HEADS, LAYERS, NUMBERS, TAPS, VOCABULARY, WIDTH

_MOST = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
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
    "moe_num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
}
_MOST_OF_ANY = 2**31 - 1  # what kernels count with


def is_above_zero(value: Any) -> TypeGuard[float]:
    """Whether a value is a number above zero that float32 holds with room to spare."""
    least, most = NUMBERS
    return type(value) in (int, float) and least <= value <= most


class ConfigReader:
    """Typed access to a config.json, with errors that name the key.

    Attributes:
        config: The parsed file.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Wraps the parsed file."""
        self.config = config

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """This file with values for keys that it lacks; a null stays one."""
        return ConfigReader({**defaults, **self.config})

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(
                f"config.json: {key} must be a positive integer, got {brief(value)}"
            )
        most = _MOST.get(key, _MOST_OF_ANY)
        if value > most:
            raise UnsupportedModelError(
                f"config.json: {key} is {brief(value)}, more than the {most:,} that are read"
            )
        return value

    def count(self, key: str, default: int) -> int:
        """An integer from zero on; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        value = default if value is None else value
        return 0 if type(value) is int and value == 0 else self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        """A finite number that is not negative."""
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
        """True or false; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UnsupportedModelError(
                f"config.json: {key} must be true or false, got {brief(value)}"
            )
        return value

    def choice(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value among a few that are computed; anything else would train a wrong model."""
        value = self.config.get(key, default)
        if value not in allowed:
            supported = ", ".join(map(repr, allowed))
            raise UnsupportedModelError(
                f"config.json: {key} = {brief(value)} is not supported (supported: {supported})"
            )
        return value

    def renamed(self, key: str, other: str) -> ConfigReader:
        """This file with what it calls ``other`` under ``key``.

        Raises:
            UnsupportedModelError: If it has both, and they differ.
        """
        if other not in self.config:
            return self
        if key in self.config and self.config[key] != self.config[other]:
            raise UnsupportedModelError(
                f"config.json: {key} {brief(self.config[key])} and {other} "
                f"{brief(self.config[other])} mean the same, but differ"
            )
        return ConfigReader({**self.config, key: self.config[other]})

    def optional_integer(self, key: str) -> int | None:
        """A positive integer; None where the key is absent or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def softcap(self, key: str, default: float | None = None) -> float | None:
        """A finite number above zero, or None where it is null."""
        value = self.config.get(key, default)
        if value is None:
            return None
        if not is_above_zero(value):
            raise UnsupportedModelError(
                f"config.json: {key} must be a number above zero or null, got {brief(value)}"
            )
        return float(value)

    def no_dropout(self, *keys: str) -> None:
        """Refuses dropouts, which no forward here computes."""
        for key in keys:
            self.choice(key, (0, 0.0, None))

    def dropped(self, dropouts: Mapping[str, float]) -> tuple[str, ...]:
        """Notes on dropouts that training leaves out, where they are not zero.

        Args:
            dropouts: Their keys, and their values where no key says it.
        """
        values = {key: self.number(key, default) for key, default in dropouts.items()}
        return tuple(
            f"{key} = {value} of config.json is not applied in training"
            for key, value in values.items()
            if value
        )
