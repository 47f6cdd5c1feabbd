"""Typed access to a GGUF file's metadata, which remembers what it was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

REQUIRED = object()
"""Stands for a default that there is not."""
SPARE = "nextn_predict_layers"
"""Layers at the end for multi-token prediction, which take no part in the logits."""
_SCALARS = (bool, int, float, str)


class Keys:
    """The keys of an architecture, such as ``llama.block_count``, without its name.

    Attributes:
        where: The file, for messages.
        architecture: What the file says that it is.
        prefix: How the keys begin.
    """

    def __init__(self, metadata: dict[str, Any], where: object, prefix: str | None = None) -> None:
        """Takes a file's metadata; keys begin with the architecture's name unless one is told."""
        self.where = where
        architecture = metadata.get("general.architecture")
        if metadata.get("general.type") == "adapter":
            raise CheckpointError(f"{where} is an adapter for llama.cpp, not a model")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{where} names no general.architecture, so it is no model")
        self.architecture = architecture
        self.prefix = prefix = f"{architecture}." if prefix is None else prefix
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._asked: set[str] = set()

    def raw(self, key: str, default: Any = None) -> Any:
        """A value of whatever type."""
        self._asked.add(key)
        return self._values.get(key, default)

    def ignore(self, *keys: str) -> None:
        """Passes over keys that tell nothing of what is computed."""
        self._asked.update(keys)

    def integer(self, key: str, default: Any = REQUIRED) -> Any:
        """A whole number; one for each layer counts where all are the same."""
        value = self.raw(key, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.where} lacks the key {self.prefix}{key}")
        if value is default:
            return value
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.where}: {self.prefix}{key} differs from layer to layer, which "
                    "is not computed"
                )
            value = value[0].item()
        if type(value) is not int:
            raise self._wrong(key, value, "a whole number")
        return value

    def each(self, key: str, layers: int) -> list[Any]:
        """A number of each layer, or one for all."""
        value = self.raw(key)
        if isinstance(value, np.ndarray) and len(value) == layers and value.dtype.kind in "iuf":
            return [shortest(v) if value.dtype.kind == "f" else v for v in value.tolist()]
        if type(value) in (int, float):
            return [shortest(value) if isinstance(value, float) else value] * min(layers, 1 << 16)
        if value is None:
            raise CheckpointError(f"{self.where} lacks the key {self.prefix}{key}")
        raise self._wrong(key, value, f"a number for each of the {layers} layers")

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number; of float32, the shortest decimal that is the same."""
        value = self.raw(key, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.where} lacks the key {self.prefix}{key}")
        if value is default:
            return value
        if type(value) not in (int, float) or not np.isfinite(np.float32(value)):
            raise self._wrong(key, value, "a number")
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def refuse(self, key: str, *allowed: Any) -> None:
        """Refuses a value that is not computed."""
        value = self.raw(key)
        if value is not None and not (type(value) in _SCALARS and value in allowed):
            raise UnsupportedModelError(
                f"{self.where}: {self.prefix}{key} = {_shown(value)} is not computed"
            )

    def refuse_the_rest(self) -> None:
        """Refuses keys that nobody has asked for."""
        unread = [key for key in self._values if key not in self._asked]
        if unread:
            raise UnsupportedModelError(
                f"{self.where}: {self.prefix}{unread[0][:200]} = "
                f"{_shown(self._values[unread[0]])} is not known, so the model may be another than "
                "what is computed: take its safetensors version"
            )

    def _wrong(self, key: str, value: Any, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {self.prefix}{key} must be {what}, got {_shown(value)}"
        )


def shortest(value: float) -> float:
    """A float32 number as people write it: 1e-05 and not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _shown(value: Any) -> str:
    return brief(value.tolist() if isinstance(value, np.ndarray) else value)
