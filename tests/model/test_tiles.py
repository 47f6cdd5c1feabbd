"""Features of tiles are put together as those of one image, without the padding of its sides."""

import numpy as np
import pytest

from qlora_wgpu.images.pixels import Tiles
from qlora_wgpu.model.tiles import joined_tiles

NEWLINE = np.array([-1, -10], np.float32)


def crops_of(rows, columns, grid):
    """A crop's features are its place in the image, and ten times it; those of the whole are 99."""
    places = np.arange(rows * grid[0] * columns * grid[1]).reshape(rows * grid[0], -1)
    features = np.stack([places, 10 * places], -1).astype(np.float32)
    tiles = [
        features[r * grid[0] :, c * grid[1] :][: grid[0], : grid[1]].reshape(-1, 2)
        for r in range(rows)
        for c in range(columns)
    ]
    return [*tiles, np.full((grid[0] * grid[1], 2), 99, np.float32)], features


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((40, 60), slice(0, 4), slice(0, 6)),  # the tiles' own ratio
        ((20, 60), slice(1, 3), slice(0, 6)),
        ((30, 60), slice(0, 4), slice(0, 6)),  # a row of padding has no other to be left out with
        ((10, 60), slice(1, 3), slice(0, 6)),
        ((40, 20), slice(0, 4), slice(2, 4)),
        ((40, 40), slice(0, 4), slice(1, 5)),
        ((40, 10), slice(0, 4), slice(2, 4)),
    ],
)
def test_rows_of_tiles_follow_the_whole_image_without_padding(size, rows, columns):
    crops, features = crops_of(2, 3, (2, 2))
    found = joined_tiles(crops, Tiles(2, 3, size), (2, 2), NEWLINE)
    expected = [np.full((4, 2), 99)]
    for row in features[rows, columns]:
        expected += [row, NEWLINE[None]]
    assert found.dtype == np.float32
    assert np.array_equal(found, np.concatenate(expected))


@pytest.mark.parametrize("grid", [(1, 3), (3, 1)])
def test_crops_need_not_be_square(grid):
    crops, features = crops_of(2, 1, grid)
    size = (2 * grid[0], grid[1])
    found = joined_tiles(crops, Tiles(2, 1, size), grid, NEWLINE)
    lines = [np.concatenate([row, NEWLINE[None]]) for row in features]
    assert np.array_equal(found, np.concatenate([crops[-1], *lines]))


def test_an_image_without_tiles_ends_with_a_new_line():
    found = joined_tiles([np.ones((4, 2), np.float32)], Tiles(), (2, 2), NEWLINE)
    assert np.array_equal(found, [[1, 1]] * 4 + [[-1, -10]])
