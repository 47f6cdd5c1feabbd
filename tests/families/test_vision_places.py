"""Tables of positions, resized to an image's patches."""

import numpy as np
import pytest
from PIL import Image

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.parts import vision_positions as positions
from qlora_wgpu.families.parts.vision_positions import AxialPositions, BilinearPositions


@pytest.mark.parametrize(("side", "count"), [
    (4, 4), (4, 8), (8, 4), (7, 3), (3, 7), (16, 5), (1, 3), (5, 1), (9, 10),
])  # fmt: skip
def test_antialiased_weights_are_those_of_a_resized_picture(side, count):
    """Pillow's bilinear filter, which PyTorch's follows."""
    made = positions._antialiased(side, count)
    assert made.shape == (count, side) and made.dtype == np.float32
    np.testing.assert_allclose(made.sum(1), 1.0, rtol=1e-6)
    for place in range(side):
        one = np.zeros((side, 1), np.float32)
        one[place] = 1.0
        image = Image.fromarray(one).resize((1, count), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(made[:, place], np.asarray(image)[:, 0], atol=2e-6)


@pytest.mark.parametrize(("side", "count", "at"), [
    (4, 4, [0, 1, 2, 3]), (5, 3, [0, 2, 4]), (3, 5, [0, 0.5, 1, 1.5, 2]), (4, 1, [0]),
    (1, 3, [0, 0, 0]),
])  # fmt: skip
def test_corners_are_at_corners(side, count, at):
    expected = [[max(1 - abs(place - each), 0) for each in range(side)] for place in at]
    np.testing.assert_allclose(positions._corner_aligned(side, count), expected, atol=1e-6)


@pytest.mark.parametrize("antialias", [False, True])
def test_rows_and_columns_are_resized_apart(antialias):
    table = np.random.default_rng(0).standard_normal((4, 4, 2)).astype(np.float32)
    own = BilinearPositions("t", 4, 2, antialias=antialias)
    make = positions._antialiased if antialias else positions._corner_aligned
    expected = np.einsum("rs,stc,ut->ruc", make(4, 3), table, make(4, 5)).reshape(15, 2)
    np.testing.assert_allclose(own.rows({"t": table.reshape(16, 2)}, (3, 5)), expected, atol=1e-6)


@pytest.mark.parametrize(("grid", "fits"), [((2, 3), True), ((3, 3), True), ((4, 1), False),
                                            ((1, 4), False)])  # fmt: skip
def test_two_tables_are_added(grid, fits):
    table = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    own = AxialPositions("t", 3, 2)
    assert own.weights() == {"t": (2, 3, 2)}
    if not fits:
        with pytest.raises(UnsupportedModelError, match=f"image processor makes {grid[0]} x"):
            own.rows({"t": table}, grid)
        return
    expected = [table[1, r] + table[0, c] for r in range(grid[0]) for c in range(grid[1])]
    assert (own.rows({"t": table}, grid) == expected).all()


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [0, 0.5]), (4, [0, 0.25, 0.5, 0.75])])
def test_fractions_of_an_image(count, places):
    assert positions._fractions(count).tolist() == places
