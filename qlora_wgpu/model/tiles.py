"""Features of images that are put together from tiles, as in LLaVA-NeXT."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlora_wgpu.images.pixels import Layout, Tiles
from qlora_wgpu.model.image_inputs import FloatArray


def joined_tiles(
    crops: Sequence[FloatArray],
    layout: Layout,
    grid: tuple[int, int],
    newline: FloatArray,
) -> FloatArray:
    """The whole image's features, then those of the tiles row by row without padding.

    Args:
        crops: The features of each crop; tiles row by row, the whole image last.
        layout: The tiles, with the size of the image before it was resized.
        grid: Rows and columns of a crop's features.
        newline: The row that ends each row of the tiles' features, and the whole image's if there
            are no tiles.
    """
    assert isinstance(layout, Tiles)
    *tiles, whole = crops
    end = newline[None].astype(np.float32)
    if not tiles:
        return np.concatenate([whole, end])
    shape = layout.rows, layout.columns, *grid, -1
    placed = np.stack(tiles).reshape(shape).transpose(0, 2, 1, 3, 4)
    rows = placed.reshape(layout.rows * grid[0], layout.columns * grid[1], -1)
    rows = _without_padding(rows, layout)
    ends = np.broadcast_to(end, (len(rows), 1, end.shape[1]))
    together = np.concatenate([rows, ends], axis=1).reshape(-1, end.shape[1])
    return np.concatenate([whole, together])


def _without_padding(rows: FloatArray, layout: Tiles) -> FloatArray:
    """Without what was added at both sides of an image to have the tiles' aspect ratio."""
    height, width = layout.size
    now_height, now_width = rows.shape[:2]
    if width / height > now_width / now_height:
        left = (now_height - int(round(height * (now_width / width), 7))) // 2
        return rows[left : now_height - left]
    left = (now_width - int(round(width * (now_height / height), 7))) // 2
    return rows[:, left : now_width - left]
