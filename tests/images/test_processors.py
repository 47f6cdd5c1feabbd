"""Image processors against recorded pixels of transformers'."""

from pathlib import Path

import numpy as np
import pytest
from references.projections import distance, projections
from support.image_models import FAMILIES, RESIZED, SIZES, bytes_of, rgb_of

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.images.pixels import BICUBIC, BILINEAR, Tiles, resize_in_torch
from qlora_wgpu.images.processors import read_image_processor

RECORDED = np.load(Path(__file__).parents[1] / "references/image_pixels.npz")


def patches(pixels, side):
    """(patches, side² · channels) row by row."""
    channels, height, width = pixels.shape
    parts = pixels.reshape(channels, height // side, side, width // side, side)
    return parts.transpose(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "lfm2_vl"])
def test_pixels_are_transformers(family):
    processor = read_image_processor(FAMILIES[family]["images"])
    for number, size in enumerate(size for sizes in SIZES for size in sizes):
        expected = RECORDED[f"{family}/{number}"]
        crops = processor(rgb_of(*size)).crops
        assert len(crops) == len(expected)
        for crop, known in zip(crops, expected, strict=True):
            found = projections("pixels", patches(crop, processor.patch_size))
            assert distance(found, known) <= 1e-6 * np.linalg.norm(crop)


@pytest.mark.parametrize("case", RESIZED)
def test_resizing_is_torchs_to_the_bit(case):
    before, after, mode = RESIZED[case]
    resample = BILINEAR if mode == "bilinear" else BICUBIC
    assert np.array_equal(resize_in_torch(bytes_of(*before), *after, resample), RECORDED[case])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("lfm2_vl", {"tile_size": 60}, "tile_size = 60 must be a multiple of 16"),
        ("lfm2_vl", {"min_tiles": 7}, "min_tiles = 7 exceeds max_tiles"),
        ("lfm2_vl", {"resample": 1}, "resample = 1 is not supported"),
        ("lfm2_vl", {"max_pixels_tolerance": 0}, "max_pixels_tolerance must be a positive number"),
        ("gemma4", {"max_soft_tokens": 256}, "max_soft_tokens must be one of 70, 140"),
    ],
)
def test_what_no_processor_supports_is_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_image_processor({**FAMILIES[family]["images"], **changes})


def test_an_image_that_is_not_divided_has_no_copy_of_itself():
    """Without a thumbnail, tiles are all that the tower reads."""
    config = FAMILIES["lfm2_vl"]["images"]
    rgb = rgb_of(300, 200)
    (tiles, alone, whole) = (
        len(read_image_processor({**config, **changes})(rgb).crops)
        for changes in ({"use_thumbnail": False}, {"do_image_splitting": False}, {})
    )
    assert (tiles + 1, alone) == (whole, 1)


def test_tiles_of_one_aspect_ratio_are_more_for_larger_images():
    """As transformers computes for these sizes."""
    processor = read_image_processor({**FAMILIES["lfm2_vl"]["images"], "max_tiles": 8})
    assert processor.layout(80, 160) == Tiles(1, 2)
    assert processor.layout(200, 400) == Tiles(2, 4)


@pytest.mark.parametrize(("width", "columns"), [(1459, 3), (1456, 2)])
def test_the_shorter_side_becomes_even_upwards(width, columns):
    """729 of the 1,456 rows' width are 730, which two tiles of 364 do not hold."""
    config = {**FAMILIES["smolvlm"]["images"], "do_image_splitting": True}
    config |= {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}
    processor = read_image_processor(config)
    assert processor.layout(2912, width) == Tiles(4, columns)
    assert processor.layout(width, 2912) == Tiles(columns, 4)
