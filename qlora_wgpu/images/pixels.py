"""What image processors share: what they make of an image, its pixels, and settings of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError, brief

RGB = npt.NDArray[np.uint8]
"""(height, width, 3)."""
Pixels = npt.NDArray[np.float32]
"""(3, height, width), normalized."""

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Pillow's numbers of filters."""

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Means and standard deviations that families use by default."""


# ---- an image for a tower ------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """How an image is divided: rows and columns of tiles, 0 where it stays whole."""

    rows: int = 0
    columns: int = 0
    # Height and width of the image itself, where its tiles have padding (LLaVA-NeXT).
    size: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        """Crops that the tower reads, the whole image among them."""
        return self.rows * self.columns + 1


@dataclass(frozen=True)
class Grid:
    """How many patches an image has."""

    rows: int
    columns: int


Layout = Tiles | Grid


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """What a vision tower reads of one image."""

    crops: tuple[Pixels, ...]  # tiles first, the whole image last; one for each image of Qwen's
    layout: Layout


class ImageProcessor(Protocol):
    """A processor of images."""

    def layout(self, height: int, width: int) -> Layout:
        """How an image of this size is divided."""

    def crop_sizes(self, height: int, width: int) -> Sequence[tuple[int, int]]:
        """Height and width of what the tower reads of an image of this size, crop by crop."""

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The pixels that the tower reads of an image."""


# ---- pixels --------------------------------------------------------------------------------------


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


def resize_in_torch(rgb: RGB, height: int, width: int, resample: int) -> RGB:
    """Resizes as torchvision does with antialiasing: bit-identical to torch 2.13 on x86 CPUs.

    Both passes, first along rows, have integer weights of 16 bits and round to bytes.
    """
    across = _resized(np.ascontiguousarray(rgb.swapaxes(0, 1)), width, resample)
    return _resized(np.ascontiguousarray(across.swapaxes(0, 1)), height, resample)


def _resized(lines: RGB, count: int, resample: int) -> RGB:
    """The same along the first axis."""
    if len(lines) == count:
        return lines
    first, weights = _filter_weights(len(lines), count, resample)
    most, bits = float(weights.max()), 0
    while bits < 22 and int(most * 2.0 ** (bits + 1) + 0.5) < 1 << 15:
        bits += 1
    weights = np.trunc(weights * 2.0**bits + np.copysign(0.5, weights))
    flat = lines.reshape(len(lines), -1)
    resized = np.empty((count, flat.shape[1]), np.uint8)
    for i, begin in enumerate(first):
        taps = flat[begin : begin + weights.shape[1]].astype(np.float64)
        total = weights[i, : len(taps)] @ taps  # of integers below 2⁵³
        resized[i] = np.clip(np.floor(total / 2.0**bits + 0.5), 0, 255)
    return resized.reshape(count, *lines.shape[1:])


def _filter_weights(
    side: int, count: int, resample: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The first pixel that each of ``count`` ones reads of ``side``, and the weights from it on."""
    scale = side / count
    stretch = max(scale, 1.0)
    radius = stretch * (2 if resample == BICUBIC else 1)
    center = scale * (np.arange(count) + 0.5)
    first = np.maximum((center - radius + 0.5).astype(np.int64), 0)
    end = np.minimum((center + radius + 0.5).astype(np.int64), side)
    pixels = first[:, None] + np.arange((end - first).max())
    away = np.abs((pixels - center[:, None] + 0.5) / stretch)
    if resample == BICUBIC:
        near, far = (1.5 * away - 2.5) * away**2 + 1, ((2.5 - 0.5 * away) * away - 4) * away + 2
        weights = np.where(away < 1, near, np.where(away < 2, far, 0.0))
    else:
        weights = np.maximum(1 - away, 0.0)
    weights *= pixels < end[:, None]
    return first, weights / weights.sum(axis=1, keepdims=True)


# ---- settings ------------------------------------------------------------------------------------


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
