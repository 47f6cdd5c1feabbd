"""What image processors make of an image: how it is divided, and the pixels of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qlora_wgpu.images.pixels import RGB, Pixels


@dataclass(frozen=True)
class Tiles:
    """How an image is divided: rows and columns of tiles, 0 where it stays whole."""

    rows: int = 0
    columns: int = 0
    # Height and width of the image itself, where its tiles have padding (LLaVA-NeXT).
    size: tuple[int, int] = (0, 0)


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

    def __call__(self, rgb: RGB) -> ProcessedImage:
        """The pixels that the tower reads of an image."""
