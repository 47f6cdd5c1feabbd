"""Pixels of images: how a processor resizes, rescales and normalizes them, by its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError, brief

RGB = npt.NDArray[np.uint8]
"""(height, width, 3)."""
Pixels = npt.NDArray[np.float32]
"""(3, height, width), normalized."""

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Means and standard deviations that families use by default."""


@dataclass(frozen=True)
class PixelScaling:
    """Rescaling and normalization, in transformers' order and types."""

    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    mean: Sequence[float] = CLIP[0]
    std: Sequence[float] = CLIP[1]

    @classmethod
    def read(cls, config: Mapping[str, Any], default: tuple[Sequence[float], ...]) -> Self:
        """Reads the keys ``do_rescale`` to ``image_std``, with the family's defaults."""
        mean, std = (
            config.get(key) or values
            for key, values in zip(("image_mean", "image_std"), default, strict=True)
        )
        return cls(
            flag(config, "do_rescale", True),
            float(config.get("rescale_factor") or 1 / 255),
            flag(config, "do_normalize", True),
            _channels("image_mean", mean),
            _channels("image_std", std),
        )

    def __call__(self, rgb: RGB) -> Pixels:
        """(3, height, width) float32 of (height, width, 3) bytes."""
        pixels = rgb.astype(np.float32)
        if self.do_rescale:
            pixels = (rgb.astype(np.float64) * self.rescale_factor).astype(np.float32)
        if self.do_normalize:
            mean, std = (np.array(values, np.float32) for values in (self.mean, self.std))
            pixels = (pixels - mean) / std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def resize(rgb: RGB, height: int, width: int, resample: int) -> RGB:
    """Resizes with one of Pillow's filters."""
    from PIL import Image

    resized = Image.fromarray(rgb).resize((width, height), resample=Image.Resampling(resample))
    return np.asarray(resized)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A setting that is true or false."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise UnsupportedModelError(
            f"preprocessor_config.json: {key} must be true or false, got {brief(value)}"
        )
    return value


def integer(config: Mapping[str, Any], key: str, default: int, most: int = 1 << 20) -> int:
    """A positive integer."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModelError(
            f"preprocessor_config.json: {key} must be an integer from 1 to {most:,}, "
            f"got {brief(value)}"
        )
    return value


def _channels(key: str, values: Any) -> tuple[float, ...]:
    is_list = isinstance(values, list | tuple) and len(values) == 3
    if not is_list or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
        raise UnsupportedModelError(
            f"preprocessor_config.json: {key} must be three numbers, got {brief(values)}"
        )
    return tuple(map(float, values))


def side_lengths(config: Mapping[str, Any], key: str, default: Mapping[str, int]) -> dict[str, int]:
    """A size: a mapping such as {"height": 224, "width": 224}, or a number for both sides."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is int:
        value = {"height": value, "width": value}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(
            f"preprocessor_config.json: {key} must be a size, got {brief(value)}"
        )
    return {name: integer(value, name, 1, 1 << 30) for name in value}
