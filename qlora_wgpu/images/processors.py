"""Image processors: from RGB pixels to what a vision tower reads, as transformers' PIL processors.

A processor is read from ``preprocessor_config.json``. ``layout`` needs an image's size alone, so
that the tokens of a row are known without decoding its images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.images.pixels import (
    CLIP,
    HALF,
    RGB,
    Pixels,
    PixelScaling,
    flag,
    integer,
    resize,
    side_lengths,
)

_BILINEAR, _BICUBIC, _LANCZOS = 2, 3, 1  # Pillow's numbers
_LONGEST_SIDE = 4096  # of what Idefics 3 resizes to
_MOST_STRETCHED = 200  # the aspect ratio that Qwen's processor takes at most


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


# ---- Idefics 3 and SmolVLM -----------------------------------------------------------------------


@dataclass(frozen=True)
class Idefics3ImageProcessor:
    """Tiles of one size, and the whole image in that size after them."""

    longest_edge: int = 4 * 364  # to which an image is resized first
    tile: int = 364  # the sides of a tile
    do_resize: bool = True
    do_image_splitting: bool = True
    resample: int = _LANCZOS
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        size = side_lengths(config, "size", {"longest_edge": 4 * 364})
        tile = side_lengths(config, "max_image_size", {"longest_edge": 364})
        for key, sides in (("size", size), ("max_image_size", tile)):
            if "longest_edge" not in sides:
                raise UnsupportedModelError(
                    f"preprocessor_config.json: {key} must have longest_edge, got {brief(sides)}"
                )
        return cls(
            size["longest_edge"],
            tile["longest_edge"],
            flag(config, "do_resize", True),
            flag(config, "do_image_splitting", True),
            integer(config, "resample", _LANCZOS),
            PixelScaling.read(config, HALF),
        )

    def layout(self, height: int, width: int) -> Tiles:
        """How an image of this size is divided."""
        if not self.do_image_splitting:
            return Tiles()
        height, width = self._whole_tiles(*self._resized(height, width))
        if max(height, width) <= self.tile:
            return Tiles()
        return Tiles(height // self.tile, width // self.tile)

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """All crops have the size of a tile."""
        return [(self.tile, self.tile)] * self.layout(height, width).count

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The tiles row by row, then the whole image; the latter alone where it is not divided."""
        side, tiles = self.tile, self.layout(*rgb.shape[:2])
        if self.do_resize:
            rgb = resize(rgb, *self._resized(*rgb.shape[:2]), self.resample)
        if self.do_image_splitting:
            rgb = resize(rgb, *self._whole_tiles(*rgb.shape[:2]), self.resample)
        cut = [
            rgb[r * side : (r + 1) * side, c * side : (c + 1) * side]
            for r in range(tiles.rows)
            for c in range(tiles.columns)
        ]
        if cut or not self.do_image_splitting:
            rgb = resize(rgb, side, side, self.resample)
        return ProcessedImage(tuple(map(self.scaling, [*cut, rgb])), tiles)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The size whose longer side is ``longest_edge``; the other one is even."""
        if not self.do_resize:
            return height, width
        ratio, longest = width / height, self.longest_edge
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _LONGEST_SIDE:
            width, height = _LONGEST_SIDE, int(_LONGEST_SIDE / ratio)
        elif height > width and height > _LONGEST_SIDE:
            height, width = _LONGEST_SIDE, int(_LONGEST_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """The next size that is made of whole tiles."""
        ratio, side = width / height, self.tile

        def up(length: int) -> int:
            return math.ceil(length / side) * side

        if width >= height:
            width = up(width)
            return up(int(width / ratio)), width
        height = up(height)
        return height, up(int(height * ratio))


# ---- Qwen ----------------------------------------------------------------------------------------


class _InPatches:
    """An image as one crop, in a size that whole patches make up."""

    patch_size: int
    do_resize: bool
    resample: int
    scaling: PixelScaling

    def layout(self, height: int, width: int) -> Grid:
        """The patches of an image of this size."""
        if self.do_resize:
            height, width = self._resized(height, width)
        return Grid(height // self.patch_size, width // self.patch_size)

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """The size of the whole image after resizing."""
        return [self._resized(height, width) if self.do_resize else (height, width)]

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
    resample: int = _BICUBIC
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
            integer(config, "resample", _BICUBIC),
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


# ---- Gemma 3 and LLaVA ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Gemma3ImageProcessor:
    """Images of one size, whatever theirs was."""

    height: int = 224
    width: int = 224
    do_resize: bool = True
    resample: int = _BILINEAR
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
            integer(config, "resample", _BILINEAR),
            PixelScaling.read(config, HALF),
        )

    def layout(self, height: int, width: int) -> Tiles:
        """Always whole."""
        return Tiles()

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what the tower reads of an image of this size."""
        return (self.height, self.width) if self.do_resize else (height, width)

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """The size of the only crop."""
        return [self.output_size(height, width)]

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The whole image."""
        if self.do_resize:
            rgb = resize(rgb, self.height, self.width, self.resample)
        return ProcessedImage((self.scaling(rgb),), Tiles())


@dataclass(frozen=True)
class ClipImageProcessor:
    """The middle of an image whose shorter side has one length."""

    shortest_edge: int = 224
    crop: tuple[int, int] = (224, 224)  # height and width
    do_resize: bool = True
    do_center_crop: bool = True
    do_pad: bool = False  # whether images are made square first, in the mean's colour
    resample: int = _BICUBIC
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
            integer(config, "resample", _BICUBIC),
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

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """The size of the only crop."""
        return [self.output_size(height, width)]

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


# ---- LLaVA-NeXT, Pixtral and Gemma 4 -------------------------------------------------------------


@dataclass(frozen=True)
class LlavaNextImageProcessor:
    """Tiles of the resolution that suits an image best, and the whole image after them."""

    pinpoints: tuple[tuple[int, int], ...] = (
        (336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008),
    )  # fmt: skip
    size: tuple[int, int] = (224, 224)  # of the whole image: height and width
    tile: int = 224
    finish: ClipImageProcessor = field(default_factory=ClipImageProcessor)  # of each crop
    resample: int = _BICUBIC

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        points = config.get("image_grid_pinpoints") or [list(p) for p in cls.pinpoints]
        if not isinstance(points, list) or not all(
            isinstance(p, list) and len(p) == 2 and all(type(n) is int and n > 0 for n in p)
            for p in points
        ):
            raise UnsupportedModelError(
                "preprocessor_config.json: image_grid_pinpoints must be a list of heights and "
                f"widths, got {brief(points)}"
            )
        size = config.get("size")
        if isinstance(size, Mapping) and size.keys() == {"height", "width"}:
            raise UnsupportedModelError(
                "preprocessor_config.json: size must have shortest_edge, got height and width"
            )
        finish = ClipImageProcessor.read({**config, "do_pad": False})
        edge = finish.shortest_edge
        pinpoints = tuple((height, width) for height, width in points)
        return cls(pinpoints, (edge, edge), finish.crop[0], finish, finish.resample)

    def layout(self, height: int, width: int) -> Tiles:
        """The tiles of an image of this size."""
        tall, wide = self._best(height, width)
        return Tiles(-(-tall // self.tile), -(-wide // self.tile), (height, width))

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Those of the tiles, then of the whole image."""
        tiles = self.layout(height, width).count - 1
        tile = self.finish.output_size(self.tile, self.tile)
        return [*[tile] * tiles, self.finish.output_size(*self.size)]

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The tiles row by row, then the whole image."""
        height, width = rgb.shape[:2]
        tall, wide = self._best(height, width)
        inner = resize(rgb, *self._within(height, width, tall, wide), self.resample)
        padded = np.zeros((tall, wide, 3), np.uint8)
        top, left = (tall - inner.shape[0]) // 2, (wide - inner.shape[1]) // 2
        padded[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
        layout, side = self.layout(height, width), self.tile
        tiles = [
            padded[r * side : (r + 1) * side, c * side : (c + 1) * side]
            for r in range(layout.rows)
            for c in range(layout.columns)
        ]
        whole = resize(rgb, *self.size, self.resample)
        crops = [self.finish(crop).crops[0] for crop in (*tiles, whole)]
        return ProcessedImage(tuple(crops), layout)

    def _best(self, height: int, width: int) -> tuple[int, int]:
        """transformers' ``select_best_resolution``."""
        best, most, least = self.pinpoints[0], 0, math.inf
        for tall, wide in self.pinpoints:
            scale = min(wide / width, tall / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            wasted = wide * tall - used
            if used > most or (used == most and wasted < least):
                best, most, least = (tall, wide), used, wasted
        return best

    def _within(self, height: int, width: int, tall: int, wide: int) -> tuple[int, int]:
        """The largest size of the image within a resolution."""
        if wide / width < tall / height:
            return min(math.ceil(height * (wide / width)), tall), wide
        return tall, min(math.ceil(width * (tall / height)), wide)


@dataclass(frozen=True)
class PixtralImageProcessor(_InPatches):
    """Images whose longer side has a maximum, of whole patches."""

    longest: tuple[int, int] = (1024, 1024)  # maximum height and width
    patch_size: int = 16
    do_resize: bool = True
    resample: int = _BICUBIC
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
            integer(config, "resample", _BICUBIC),
            PixelScaling.read(config, CLIP),
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.longest[0], width / self.longest[1])
        if ratio > 1:
            height, width = (max(math.floor(side / ratio), 1) for side in (height, width))
        rows, columns = (-(-side // self.patch_size) for side in (height, width))
        return rows * self.patch_size, columns * self.patch_size


# ---- which one -----------------------------------------------------------------------------------


def _siglip(config: Mapping[str, Any]) -> Gemma3ImageProcessor:
    """As Gemma 3's, with another filter by default."""
    return Gemma3ImageProcessor.read({**config, "resample": config.get("resample", _BICUBIC)})


PROCESSORS: Mapping[str, Callable[[Mapping[str, Any]], ImageProcessor]] = {
    "Idefics3ImageProcessor": Idefics3ImageProcessor.read,
    "SmolVLMImageProcessor": Idefics3ImageProcessor.read,
    "Qwen2VLImageProcessor": Qwen2VLImageProcessor.read,
    "Gemma3ImageProcessor": Gemma3ImageProcessor.read,
    "SiglipImageProcessor": _siglip,
    "CLIPImageProcessor": ClipImageProcessor.read,
    "LlavaImageProcessor": ClipImageProcessor.read,
    "LlavaNextImageProcessor": LlavaNextImageProcessor.read,
    "PixtralImageProcessor": PixtralImageProcessor.read,
}


def read_image_processor(config: Mapping[str, Any]) -> ImageProcessor:
    """Reads preprocessor_config.json by its ``image_processor_type``.

    Raises:
        UnsupportedModelError: If the processor, or what it is set to, is not supported.
    """
    name = config.get("image_processor_type", config.get("feature_extractor_type"))
    plain = name.removesuffix("Fast").removesuffix("Pil") if isinstance(name, str) else ""
    if plain not in PROCESSORS:
        raise UnsupportedModelError(
            f"preprocessor_config.json: image_processor_type {brief(name)} is not supported "
            f"(supported: {', '.join(PROCESSORS)})"
        )
    return PROCESSORS[plain](config)
