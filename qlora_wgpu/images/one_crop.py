"""Image processors that make one crop of an image, as transformers' PIL processors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.images.pixels import (
    BICUBIC,
    BILINEAR,
    CLIP,
    HALF,
    RGB,
    Grid,
    PixelScaling,
    ProcessedImage,
    Tiles,
    flag,
    integer,
    resize,
    side_lengths,
)

_MOST_STRETCHED = 200  # the aspect ratio that Qwen's processor takes at most


class _OneCrop:
    """The crops of these processors."""

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what the tower reads of an image of this size."""
        raise NotImplementedError

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """The size of the only crop."""
        return [self.output_size(height, width)]


# ---- of the size that a tower reads --------------------------------------------------------------


@dataclass(frozen=True)
class Gemma3ImageProcessor(_OneCrop):
    """Images of one size, whatever theirs was."""

    height: int = 224
    width: int = 224
    do_resize: bool = True
    resample: int = BILINEAR
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        if flag(config, "do_pan_and_scan", False):
            raise UnsupportedModelError(
                "preprocessor_config.json: do_pan_and_scan = true is not supported"
            )
        size = side_lengths(config, "size", {"height": 224, "width": 224})
        if size.keys() != {"height", "width"}:
            raise UnsupportedModelError(
                f"preprocessor_config.json: size must have height and width, got {brief(size)}"
            )
        return cls(
            size["height"],
            size["width"],
            flag(config, "do_resize", True),
            integer(config, "resample", BILINEAR),
            PixelScaling.read(config, HALF),
        )

    def layout(self, height: int, width: int) -> Tiles:
        """Always whole."""
        return Tiles()

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what the tower reads of an image of this size."""
        return (self.height, self.width) if self.do_resize else (height, width)

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The whole image."""
        if self.do_resize:
            rgb = resize(rgb, self.height, self.width, self.resample)
        return ProcessedImage((self.scaling(rgb),), Tiles())


@dataclass(frozen=True)
class ClipImageProcessor(_OneCrop):
    """The middle of an image whose shorter side has one length."""

    shortest_edge: int = 224
    crop: tuple[int, int] = (224, 224)  # height and width
    do_resize: bool = True
    do_center_crop: bool = True
    do_pad: bool = False  # whether images are made square first, in the mean's colour
    resample: int = BICUBIC
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        size = config.get("size")
        if type(size) is int:  # as CLIP's first files
            size = {"shortest_edge": size}
        sides = side_lengths({"size": size}, "size", {"shortest_edge": 224})
        if "shortest_edge" not in sides:
            raise UnsupportedModelError(
                f"preprocessor_config.json: size must have shortest_edge, got {brief(sides)}"
            )
        crop = side_lengths(config, "crop_size", {"height": 224, "width": 224})
        return cls(
            sides["shortest_edge"],
            (crop["height"], crop["width"]),
            flag(config, "do_resize", True),
            flag(config, "do_center_crop", True),
            flag(config, "do_pad", False),
            integer(config, "resample", BICUBIC),
            PixelScaling.read(config, CLIP),
        )

    def layout(self, height: int, width: int) -> Tiles:
        """Always whole."""
        return Tiles()

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what the tower reads of an image of this size."""
        if self.do_center_crop:
            return self.crop
        if self.do_pad:
            height = width = max(height, width)
        return self._resized(height, width) if self.do_resize else (height, width)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The size whose shorter side is ``shortest_edge``."""
        longer = int(self.shortest_edge * max(height, width) / min(height, width))
        return (self.shortest_edge, longer) if height <= width else (longer, self.shortest_edge)

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The middle of the image."""
        if self.do_pad:
            rgb = self._squared(rgb)
        if self.do_resize:
            rgb = resize(rgb, *self._resized(*rgb.shape[:2]), self.resample)
        if self.do_center_crop:
            rgb = _center(rgb, *self.crop)
        return ProcessedImage((self.scaling(rgb),), Tiles())

    def _squared(self, rgb: RGB) -> RGB:
        height, width = rgb.shape[:2]
        side = max(height, width)
        square = np.empty((side, side, 3), np.uint8)
        square[:] = [int(255 * mean) for mean in self.scaling.mean]
        top, left = (side - height) // 2, (side - width) // 2
        square[top : top + height, left : left + width] = rgb
        return square


def _center(rgb: RGB, height: int, width: int) -> RGB:
    """The middle, with black where the image is smaller."""
    top, left = (rgb.shape[0] - height) // 2, (rgb.shape[1] - width) // 2
    if top >= 0 and left >= 0:
        return rgb[top : top + height, left : left + width]
    whole = np.zeros((max(height, rgb.shape[0]), max(width, rgb.shape[1]), 3), np.uint8)
    down = math.ceil((whole.shape[0] - rgb.shape[0]) / 2)
    right = math.ceil((whole.shape[1] - rgb.shape[1]) / 2)
    whole[down : down + rgb.shape[0], right : right + rgb.shape[1]] = rgb
    top, left = top + down, left + right
    return whole[top : top + height, left : left + width]


# ---- of whole patches ----------------------------------------------------------------------------


class _InPatches(_OneCrop):
    """An image as one crop, in a size that whole patches make up."""

    patch_size: int
    do_resize: bool
    resample: int
    scaling: PixelScaling

    def layout(self, height: int, width: int) -> Grid:
        """The patches of an image of this size."""
        height, width = self.output_size(height, width)
        return Grid(height // self.patch_size, width // self.patch_size)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the whole image after resizing."""
        return self._resized(height, width) if self.do_resize else (height, width)

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """One crop, the whole image."""
        layout = self.layout(*rgb.shape[:2])
        if self.do_resize:
            rgb = resize(rgb, *self._resized(*rgb.shape[:2]), self.resample)
        return ProcessedImage((self.scaling(rgb),), layout)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        raise NotImplementedError


@dataclass(frozen=True)
class Qwen2VLImageProcessor(_InPatches):
    """Images of any size that whole merged patches make up, within bounds of their pixels."""

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_size: int = 14
    merge_size: int = 2
    do_resize: bool = True
    resample: int = BICUBIC
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json, whose older keys are min_pixels and max_pixels."""
        size = side_lengths(
            config, "size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        )
        return cls(
            integer(config, "min_pixels", size.get("shortest_edge", 56 * 56), 1 << 30),
            integer(config, "max_pixels", size.get("longest_edge", 28 * 28 * 1280), 1 << 30),
            integer(config, "patch_size", 14),
            integer(config, "merge_size", 2),
            flag(config, "do_resize", True),
            integer(config, "resample", BICUBIC),
            PixelScaling.read(config, CLIP),
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """transformers' ``smart_resize``."""
        if max(height, width) > _MOST_STRETCHED * min(height, width):
            raise UnsupportedModelError(
                f"an image of {width} x {height} pixels is too narrow: one side may be "
                f"{_MOST_STRETCHED} times as long as the other one"
            )
        unit = self.patch_size * self.merge_size
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit * unit < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit


@dataclass(frozen=True)
class PixtralImageProcessor(_InPatches):
    """Images whose longer side has a maximum, of whole patches."""

    longest: tuple[int, int] = (1024, 1024)  # maximum height and width
    patch_size: int = 16
    do_resize: bool = True
    resample: int = BICUBIC
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        size = side_lengths(config, "size", {"longest_edge": 1024})
        edge = size.get("longest_edge")
        patch = side_lengths(config, "patch_size", {"height": 16, "width": 16})
        if edge is None and size.keys() != {"height", "width"}:
            raise UnsupportedModelError(
                f"preprocessor_config.json: size must have longest_edge, got {brief(size)}"
            )
        if patch["height"] != patch["width"]:
            raise UnsupportedModelError(
                f"preprocessor_config.json: patch_size must be square, got {brief(patch)}"
            )
        return cls(
            (edge, edge) if edge is not None else (size["height"], size["width"]),
            patch["height"],
            flag(config, "do_resize", True),
            integer(config, "resample", BICUBIC),
            PixelScaling.read(config, CLIP),
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.longest[0], width / self.longest[1])
        if ratio > 1:
            height, width = (max(math.floor(side / ratio), 1) for side in (height, width))
        rows, columns = (-(-side // self.patch_size) for side in (height, width))
        return rows * self.patch_size, columns * self.patch_size


@dataclass(frozen=True)
class Gemma4ImageProcessor(_InPatches):
    """Images with as many averaged patches as a maximum allows."""

    max_soft_tokens: int = 280  # of averaged patches
    patch_size: int = 16
    pooling_kernel_size: int = 3  # patches of a side that are averaged
    do_resize: bool = True
    resample: int = BICUBIC
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        tokens = integer(config, "max_soft_tokens", 280)
        if tokens not in _SOFT_TOKENS:
            raise UnsupportedModelError(
                "preprocessor_config.json: max_soft_tokens must be one of "
                f"{', '.join(map(str, _SOFT_TOKENS))}, got {tokens}"
            )
        normalizes = {**config, "do_normalize": flag(config, "do_normalize", False)}
        return cls(
            tokens,
            integer(config, "patch_size", 16),
            integer(config, "pooling_kernel_size", 3),
            flag(config, "do_resize", True),
            integer(config, "resample", BICUBIC),
            PixelScaling.read(normalizes, ((0.0,) * 3, (1.0,) * 3)),
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The largest size of whole averaged patches with about the image's aspect ratio."""
        unit, most = self.pooling_kernel_size * self.patch_size, self.max_soft_tokens
        factor = math.sqrt(most * unit**2 / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if not rows:
            columns = min(width // height, most)
        elif not columns:
            rows = min(height // width, most)
        return max(rows, 1) * unit, max(columns, 1) * unit


_SOFT_TOKENS = (70, 140, 280, 560, 1120)
