"""Image processors that divide an image into tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.images.one_crop import ClipImageProcessor
from qlora_wgpu.images.pixels import (
    BICUBIC,
    BILINEAR,
    HALF,
    LANCZOS,
    RGB,
    PixelScaling,
    ProcessedImage,
    Tiles,
    flag,
    integer,
    resize,
    resize_in_torch,
    side_lengths,
)

_LONGEST_SIDE = 4096  # of what Idefics 3 resizes to

# ---- Idefics 3 and SmolVLM -----------------------------------------------------------------------


@dataclass(frozen=True)
class Idefics3ImageProcessor:
    """Tiles of one size, and the whole image in that size after them."""

    longest_edge: int = 4 * 364  # to which an image is resized first
    tile: int = 364  # the sides of a tile
    do_resize: bool = True
    do_image_splitting: bool = True
    resample: int = LANCZOS
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
            integer(config, "resample", LANCZOS),
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


# ---- LLaVA-NeXT ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlavaNextImageProcessor:
    """Tiles of the resolution that suits an image best, and the whole image after them."""

    pinpoints: tuple[tuple[int, int], ...] = (
        (336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008),
    )  # fmt: skip
    size: tuple[int, int] = (224, 224)  # of the whole image: height and width
    tile: int = 224
    finish: ClipImageProcessor = field(default_factory=ClipImageProcessor)  # of each crop
    resample: int = BICUBIC

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


# ---- LFM2-VL -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lfm2VlImageProcessor:
    """Small images in a size of whole merged patches; large ones in tiles, with a small copy."""

    tokens: tuple[int, int] = (64, 256)  # minimum and maximum of an image that is not divided
    unit: int = 32  # the side of merged patches in pixels
    patch_size: int = 16
    tile: int = 512  # the sides of a tile
    tiles: tuple[int, int] = (2, 10)  # minimum and maximum number of them
    do_image_splitting: bool = True
    use_thumbnail: bool = True
    tolerance: float = 2.0  # the factor of the maximum beyond which images are divided
    resample: int = BILINEAR
    scaling: PixelScaling = field(default_factory=PixelScaling)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Reads preprocessor_config.json."""
        patch, tile = integer(config, "encoder_patch_size", 16), integer(config, "tile_size", 512)
        unit = patch * integer(config, "downsample_factor", 2)
        tokens = integer(config, "min_image_tokens", 64), integer(config, "max_image_tokens", 256)
        counts = integer(config, "min_tiles", 2, 100), integer(config, "max_tiles", 10, 100)
        splits = flag(config, "do_image_splitting", True) and counts != (1, 1)
        tolerance = config.get("max_pixels_tolerance", 2.0)
        resample = integer(config, "resample", BILINEAR)
        for is_wrong, problem in (
            (splits and tile % unit, f"tile_size = {tile} must be a multiple of {unit}"),
            (splits and counts[0] > counts[1], f"min_tiles = {counts[0]} exceeds max_tiles"),
            (
                type(tolerance) not in (int, float) or not tolerance > 0,
                f"max_pixels_tolerance must be a positive number, got {brief(tolerance)}",
            ),
            (resample not in (BILINEAR, BICUBIC), f"resample = {resample} is not supported"),
        ):
            if is_wrong:
                raise UnsupportedModelError(f"preprocessor_config.json: {problem}")
        return cls(
            tokens, unit, patch, tile, counts, splits, flag(config, "use_thumbnail", True),
            float(tolerance), resample, PixelScaling.read(config, HALF),
        )  # fmt: skip

    def layout(self, height: int, width: int) -> Tiles:
        """How an image of this size is divided."""
        most = self.tokens[1] * self.unit**2 * self.tolerance
        tall, wide = (
            max(self.patch_size, round(side / self.unit) * self.unit) for side in (height, width)
        )
        if not self.do_image_splitting or tall * wide <= most:
            return Tiles()
        return self._best(height, width)

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Those of the tiles, then of the whole image if it is read."""
        tiles = self.layout(height, width)
        whole = [self.whole_size(height, width)] if self.is_whole_read(tiles) else []
        return [(self.tile, self.tile)] * (tiles.rows * tiles.columns) + whole

    def is_whole_read(self, tiles: Tiles) -> bool:
        """Whether the tower reads the whole image: alone, or after its tiles."""
        return not tiles.rows or (self.use_thumbnail and tiles.rows * tiles.columns > 1)

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The tiles row by row, then the whole image."""
        size, tiles, side = rgb.shape[:2], self.layout(*rgb.shape[:2]), self.tile
        crops = []
        if tiles.rows:
            large = resize_in_torch(rgb, tiles.rows * side, tiles.columns * side, self.resample)
            crops = [
                large[r * side : (r + 1) * side, c * side : (c + 1) * side]
                for r in range(tiles.rows)
                for c in range(tiles.columns)
            ]
        if self.is_whole_read(tiles):
            crops.append(resize_in_torch(rgb, *self.whole_size(*size), self.resample))
        return ProcessedImage(tuple(map(self.scaling, crops)), tiles)

    def whole_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the whole image: its tokens are between the minimum and the maximum."""
        unit = self.unit
        fewest, most = (count * unit**2 for count in self.tokens)
        tall, wide = (max(unit, round(side / unit) * unit) for side in (height, width))
        if tall * wide > most:
            shrink = math.sqrt(height * width / most)
            tall, wide = (
                max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)
            )
        elif tall * wide < fewest:
            grow = math.sqrt(fewest / (height * width))
            tall, wide = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return tall, wide

    def _best(self, height: int, width: int) -> Tiles:
        """The tiles whose aspect ratio is closest; of equally close ones the last that suits."""
        fewest, most = self.tiles
        sides = range(1, most + 1)
        grids = {(c, r) for c in sides for r in sides if fewest <= c * r <= most}
        closest, best = math.inf, (1, 1)
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            apart = abs(width / height - columns / rows)
            fills = height * width > 0.5 * self.tile**2 * columns * rows
            if apart < closest or (apart == closest and fills):
                closest, best = apart, (columns, rows)
        return Tiles(best[1], best[0])
