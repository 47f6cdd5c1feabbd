"""Learned positions of an image's patches, which the host adds to their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.parts.vision import FloatArray

_BELOW_ONE = np.float32(1.0 - 1e-6)


@dataclass(frozen=True)
class _Table:
    """A table with a row for each patch of a square."""

    name: str  # its tensor
    side: int  # patches of the square's side
    hidden_size: int

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: (self.side**2, self.hidden_size)}


@dataclass(frozen=True)
class FixedPositions(_Table):
    """Positions of images of one size, with those of a class token in front if it has a name."""

    class_embedding: str = ""

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        rows = self.side**2 + bool(self.class_embedding)
        shapes: dict[str, tuple[int, ...]] = {self.name: (rows, self.hidden_size)}
        if self.class_embedding:
            shapes[self.class_embedding] = (self.hidden_size,)
        return shapes

    def rows(self, tables: Mapping[str, FloatArray], grid: tuple[int, int]) -> FloatArray:
        """All of the table."""
        if grid != (self.side, self.side):
            raise UnsupportedModelError(
                f"the vision tower has positions for {self.side} x {self.side} patches, but the "
                f"image processor makes {grid[0]} x {grid[1]}: check size and crop_size in "
                "preprocessor_config.json"
            )
        rows = tables[self.name]
        if self.class_embedding:
            rows = rows.copy()
            rows[0] += tables[self.class_embedding]
        return rows


@dataclass(frozen=True)
class FractionalPositions(_Table):
    """The row of the table at the same fraction of the image, as in NaViT (Idefics 3)."""

    def rows(self, tables: Mapping[str, FloatArray], grid: tuple[int, int]) -> FloatArray:
        """Computed in float32 as in transformers, since places may be at a boundary."""
        step = 1 / self.side
        boundaries = np.arange(step, 1.0, step).astype(np.float32)
        row, column = (
            np.searchsorted(boundaries, _fractions(count), side="right") for count in grid
        )
        taken: FloatArray = tables[self.name][(row[:, None] * self.side + column).reshape(-1)]
        return taken


def _fractions(count: int) -> FloatArray:
    at = np.arange(count, dtype=np.float32) * (np.float32(1.0) / np.float32(count))
    below: FloatArray = np.minimum(at, _BELOW_ONE)
    return below


@dataclass(frozen=True)
class BilinearPositions(_Table):
    """The table resized to the image's patches: its corners to theirs, or with antialiasing."""

    antialias: bool = False

    def rows(self, tables: Mapping[str, FloatArray], grid: tuple[int, int]) -> FloatArray:
        table = tables[self.name].reshape(self.side, self.side, -1)
        make = _antialiased if self.antialias else _corner_aligned
        down, across = (make(self.side, count) for count in grid)
        rows: FloatArray = np.einsum("rs,stc,ut->ruc", down, table, across, optimize=True)
        return rows.reshape(-1, self.hidden_size).astype(np.float32)


@dataclass(frozen=True)
class AxialPositions:
    """The sum of a row for the patch's column and one for its row, each of a table of its own."""

    name: str  # the tensor of both tables, that of columns first
    length: int  # rows of each
    hidden_size: int

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: (2, self.length, self.hidden_size)}

    def rows(self, tables: Mapping[str, FloatArray], grid: tuple[int, int]) -> FloatArray:
        if max(grid) > self.length:
            raise UnsupportedModelError(
                f"the vision tower has positions for {self.length} patches of a side, but the "
                f"image processor makes {grid[0]} x {grid[1]}: check preprocessor_config.json"
            )
        of_column, of_row = tables[self.name]
        rows: FloatArray = of_row[: grid[0], None] + of_column[None, : grid[1]]
        return rows.reshape(-1, self.hidden_size)


def _corner_aligned(side: int, count: int) -> FloatArray:
    """(count, side) weights; places in float32 as in transformers."""
    at = np.arange(count, dtype=np.float32) * np.float32(side - 1)
    at = at / np.float32(max(count - 1, 1))
    distance = np.abs(at[:, None] - np.arange(side, dtype=np.float32))
    hats: FloatArray = np.maximum(np.float32(1.0) - distance, np.float32(0.0))
    return hats


def _antialiased(side: int, count: int) -> FloatArray:
    """(count, side) weights of torch's interpolate with antialias: hats as wide as a patch."""
    scale = side / count
    width = max(scale, 1.0)
    weights = np.zeros((count, side), np.float32)
    for i in range(count):
        center = scale * (i + 0.5)
        first, end = max(int(center - width + 0.5), 0), min(int(center + width + 0.5), side)
        taps = (np.arange(first, end) - center + 0.5) / width
        own = np.maximum(1.0 - np.abs(taps), 0.0)
        weights[i, first:end] = own / own.sum()
    return weights
