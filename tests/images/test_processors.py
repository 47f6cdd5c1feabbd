"""Image processors against recorded pixels of transformers'."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from references.projections import distance, projections
from support.image_models import FAMILIES, RESIZED, SIZES, bytes_of, rgb_of

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.images.pixels import (
    BICUBIC,
    BILINEAR,
    LANCZOS,
    Grid,
    PixelScaling,
    Tiles,
    resize_in_torch,
)
from qlora_wgpu.images.processors import read_image_processor

RECORDED = np.load(Path(__file__).parents[1] / "references/image_pixels.npz")


def patches(pixels, side):
    """(patches, side² · channels) row by row."""
    channels, height, width = pixels.shape
    parts = pixels.reshape(channels, height // side, side, width // side, side)
    return parts.transpose(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


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
        ("lfm2_vl", {"max_pixels_tolerance": "2"}, "max_pixels_tolerance must be a positive"),
        ("lfm2_vl", {"max_tiles": 101}, "max_tiles must be an integer from 1 to 100, got 101"),
        ("lfm2_vl", {"min_tiles": 101}, "min_tiles must be an integer from 1 to 100, got 101"),
        ("lfm2_vl", {"tile_size": True}, "tile_size must be an integer from 1 to 1,048,576"),
        ("lfm2_vl", {"tile_size": 0}, "tile_size must be an integer from 1"),
        ("lfm2_vl", {"use_thumbnail": 1}, "use_thumbnail must be true or false, got 1"),
        ("lfm2_vl", {"image_mean": [0.5, 0.5]}, "image_mean must be three numbers"),
        ("lfm2_vl", {"image_mean": [0.5, 0.5, float("inf")]}, "image_mean must be three numbers"),
        ("lfm2_vl", {"image_std": [0.5, 0.5, True]}, "image_std must be three numbers"),
        ("lfm2_vl", {"image_std": 0.5}, "image_std must be three numbers"),
        ("idefics3", {"size": {"height": 9, "width": 9}}, "size must have longest_edge"),
        ("idefics3", {"max_image_size": 9}, "max_image_size must have longest_edge"),
        ("idefics3", {"size": {"longest_edge": (1 << 30) + 1}}, "longest_edge must be an integer"),
        ("idefics3", {"size": [9, 9]}, "size must be a size"),
        ("llava_next", {"image_grid_pinpoints": {"56": 56}}, "image_grid_pinpoints must be a list"),
        ("llava_next", {"image_grid_pinpoints": [56, 112]}, "image_grid_pinpoints must be a list"),
        ("llava_next", {"image_grid_pinpoints": [[56, 56, 56]]}, "image_grid_pinpoints must be"),
        ("llava_next", {"image_grid_pinpoints": [[56, 0]]}, "image_grid_pinpoints must be a list"),
        ("llava_next", {"image_grid_pinpoints": [[56, 9.5]]}, "image_grid_pinpoints must be a"),
        ("llava_next", {"image_grid_pinpoints": [[56, 56], [0, 0]]}, "image_grid_pinpoints must"),
        (
            "llava_next",
            {"size": {"height": 56, "width": 56}},
            "size must have shortest_edge, got",
        ),
        ("llava", {"size": {"height": 56}}, "size must have shortest_edge"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan = true is not supported"),
        ("gemma3", {"size": {"height": 56}}, "size must have height and width"),
        ("mistral3", {"size": {"height": 56}}, "size must have longest_edge"),
        ("mistral3", {"patch_size": {"height": 14, "width": 7}}, "patch_size must be square"),
        ("llava", {"image_processor_type": "ViTImageProcessor"}, "ViTImageProcessor' is not supp"),
        ("llava", {"image_processor_type": 7}, "image_processor_type 7 is not supported"),
        ("gemma4", {"max_soft_tokens": 256}, "max_soft_tokens must be one of 70, 140"),
    ],
)
def test_what_no_processor_supports_is_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_image_processor({**FAMILIES[family]["images"], **changes})


HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
CROPPED = {"do_resize": True, "do_center_crop": True, "do_pad": False, "resample": BICUBIC}
DEFAULTS = {  # transformers'
    "Idefics3": (
        {"longest_edge": 1456, "tile": 364, "do_resize": True, "do_image_splitting": True,
         "resample": LANCZOS}, HALF,
    ),
    "Qwen2VL": (
        {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "merge_size": 2,
         "do_resize": True, "resample": BICUBIC}, CLIP,
    ),
    "Gemma3": ({"height": 224, "width": 224, "do_resize": True, "resample": BILINEAR}, HALF),
    "Siglip": ({"height": 224, "width": 224, "do_resize": True, "resample": BICUBIC}, HALF),
    "Gemma4": (
        {"max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "do_resize": True,
         "resample": BICUBIC}, {"do_normalize": False, "mean": (0.0,) * 3, "std": (1.0,) * 3},
    ),
    "CLIP": ({"shortest_edge": 224, "crop": (224, 224), **CROPPED}, CLIP),
    "Lfm2Vl": (
        {"tokens": (64, 256), "unit": 32, "patch_size": 16, "tile": 512, "tiles": (2, 10),
         "do_image_splitting": True, "use_thumbnail": True, "tolerance": 2.0,
         "resample": BILINEAR}, HALF,
    ),
    "Pixtral": (
        {"longest": (1024, 1024), "patch_size": 16, "do_resize": True, "resample": BICUBIC}, CLIP,
    ),
}  # fmt: skip
BYTES = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_file_leaves_out_is_transformers_default(name):
    """Also if the type is the one of another implementation, and under its older name."""
    sizes, colours = DEFAULTS[name]
    for key, suffix in (("image_processor_type", "Fast"), ("feature_extractor_type", "Pil")):
        processor = read_image_processor({key: f"{name}ImageProcessor{suffix}"})
        assert asdict(processor) == {**sizes, "scaling": BYTES | colours}
        assert processor == type(processor)(scaling=PixelScaling(**colours), **sizes)
    assert asdict(type(processor)()) == {
        **sizes, "scaling": BYTES | CLIP, **({"resample": BILINEAR} if name == "Siglip" else {}),
    }  # fmt: skip


def test_tiles_of_llava_next_by_default():
    processor = read_image_processor({"image_processor_type": "LlavaNextImageProcessor"})
    points = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    assert (processor.pinpoints, processor.size, processor.tile) == (points, (224, 224), 224)
    assert asdict(processor.finish) == asdict(
        read_image_processor({"image_processor_type": "CLIPImageProcessor"})
    )
    assert processor.resample == BICUBIC and processor == type(processor)()


IDEFICS3 = {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 8}}
EDGE_32 = IDEFICS3 | {"size": {"longest_edge": 32}}
AS_IS = IDEFICS3 | {"do_resize": False}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 280 * 280},
}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "patch_size": 10}
OBLONG = PIXTRAL | {"size": {"height": 100, "width": 200}}
GEMMA4, LFM2 = FAMILIES["gemma4"]["images"], FAMILIES["lfm2_vl"]["images"]
NEXT = FAMILIES["llava_next"]["images"]


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (EDGE_32, (8, 8), Tiles(4, 4)),
        (EDGE_32, (100, 300), Tiles(2, 4)),
        (EDGE_32, (300, 100), Tiles(4, 2)),
        (EDGE_32, (1, 1000), Tiles(1, 4)),
        (EDGE_32, (1000, 1), Tiles(4, 1)),
        (EDGE_32 | {"size": {"longest_edge": 8192}}, (64, 64), Tiles(512, 512)),  # 4096 at most
        (EDGE_32 | {"size": {"longest_edge": 8192}}, (1, 8), Tiles(64, 512)),
        (EDGE_32 | {"size": {"longest_edge": 8192}}, (8, 1), Tiles(512, 64)),
        (EDGE_32 | {"do_image_splitting": False}, (8, 8), Tiles()),
        (AS_IS, (8, 8), Tiles()),
        (AS_IS, (8, 6), Tiles()),
        (AS_IS, (9, 8), Tiles(2, 2)),
        (AS_IS, (8, 9), Tiles(2, 2)),
        (AS_IS, (6, 25), Tiles(1, 4)),
        (AS_IS, (25, 6), Tiles(4, 1)),
        (NEXT, (40, 60), Tiles(1, 2, (40, 60))),
        (NEXT, (300, 200), Tiles(2, 2, (300, 200))),
        (NEXT, (112, 56), Tiles(2, 1, (112, 56))),
        (NEXT, (300, 60), Tiles(3, 1, (300, 60))),
        (NEXT, (60, 300), Tiles(1, 3, (60, 300))),
        (NEXT, (9, 1), Tiles(1, 2, (9, 1))),  # of equals the first
        (LFM2, (40, 60), Tiles()),
        (LFM2, (78, 78), Tiles(2, 2)),
        (LFM2, (72, 88), Tiles()),  # 4 · 6 patches, twice the maximum
        (LFM2, (88, 88), Tiles(2, 2)),
        (LFM2, (300, 200), Tiles(3, 2)),
        (LFM2, (333, 1000), Tiles(1, 3)),
        (QWEN, (56, 56), Grid(4, 4)),
        (QWEN, (28, 28), Grid(4, 4)),  # at least
        (QWEN, (14, 56), Grid(2, 8)),
        (QWEN, (280, 280), Grid(20, 20)),  # at most
        (QWEN, (300, 280), Grid(20, 18)),
        (QWEN, (10, 2000), Grid(2, 58)),
        (QWEN, (2000, 10), Grid(58, 2)),
        (QWEN | {"min_pixels": 112**2}, (56, 56), Grid(8, 8)),
        (QWEN | {"max_pixels": 112**2}, (280, 280), Grid(8, 8)),
        (QWEN | {"do_resize": False}, (28, 42), Grid(2, 3)),
        (QWEN | {"merge_size": 1, "patch_size": 28}, (84, 140), Grid(3, 5)),
        (PIXTRAL | {"size": {"longest_edge": 100}}, (100, 100), Grid(10, 10)),
        (PIXTRAL | {"size": {"longest_edge": 100}}, (101, 95), Grid(10, 10)),
        (PIXTRAL | {"size": {"longest_edge": 100}}, (101, 90), Grid(10, 9)),
        (PIXTRAL | {"size": {"longest_edge": 100}}, (1, 2000), Grid(1, 10)),
        (PIXTRAL | {"size": {"longest_edge": 100}}, (2000, 1), Grid(10, 1)),
        (PIXTRAL, (20, 31), Grid(2, 4)),
        (OBLONG, (100, 200), Grid(10, 20)),
        (OBLONG, (200, 200), Grid(10, 10)),
        (OBLONG, (100, 400), Grid(5, 20)),
        (GEMMA4, (40, 60), Grid(18, 30)),
        (GEMMA4, (97, 97), Grid(24, 24)),
        (GEMMA4, (1, 9), Grid(6, 75)),
        (GEMMA4, (2, 300), Grid(3, 210)),  # at most as many patches as are asked for
        (GEMMA4, (300, 2), Grid(210, 3)),
        (GEMMA4, (300, 3), Grid(210, 3)),
        (GEMMA4, (3, 220), Grid(3, 210)),
    ],
)
def test_an_image_is_divided_by_its_size_alone(config, size, expected):
    processor = read_image_processor(config)
    assert processor.layout(*size) == expected
    crops = processor.crop_sizes(*size)
    if isinstance(expected, Grid):
        patch = processor.patch_size
        assert crops == [(expected.rows * patch, expected.columns * patch)]
    if sum(height * width for height, width in crops) < 1 << 18:
        made = processor(rgb_of(*size))
        assert made.layout == expected
        assert [crop.shape for crop in made.crops] == [(3, *each) for each in crops]


CLIP_50 = {"image_processor_type": "CLIPImageProcessor", "size": 50}
WHOLE = CLIP_50 | {"do_center_crop": False}
GEMMA3 = {"image_processor_type": "Gemma3ImageProcessor"}


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (CLIP_50, (30, 20), [(224, 224)]),
        (CLIP_50 | {"crop_size": {"height": 20, "width": 30}}, (30, 20), [(20, 30)]),
        (CLIP_50 | {"crop_size": 64}, (30, 20), [(64, 64)]),
        (WHOLE, (30, 20), [(75, 50)]),
        (WHOLE, (20, 30), [(50, 75)]),
        (WHOLE, (21, 32), [(50, 76)]),
        (WHOLE | {"do_pad": True}, (20, 30), [(50, 50)]),
        (WHOLE | {"do_pad": True, "do_resize": False}, (20, 30), [(30, 30)]),
        (WHOLE | {"do_resize": False}, (30, 20), [(30, 20)]),
        (GEMMA3 | {"size": {"height": 30, "width": 40}}, (20, 30), [(30, 40)]),
        (GEMMA3 | {"do_resize": False}, (20, 30), [(20, 30)]),
        (LFM2, (40, 60), [(32, 64)]),
        (LFM2, (1, 9), [(16, 96)]),
        (LFM2, (16, 16), [(32, 32)]),  # at least 4 merged patches
        (LFM2, (60, 60), [(48, 48)]),  # at most 12
        (LFM2, (97, 97), [(64, 64)] * 4 + [(48, 48)]),
        (LFM2 | {"use_thumbnail": False}, (97, 97), [(64, 64)] * 4),
        (LFM2 | {"use_thumbnail": False}, (40, 60), [(32, 64)]),
        (LFM2 | {"min_tiles": 1, "max_tiles": 1}, (97, 97), [(48, 48)]),
        (NEXT, (40, 60), [(56, 56)] * 3),
        (EDGE_32, (100, 300), [(8, 8)] * 9),
    ],
)
def test_crops_have_the_sizes_that_are_told_before(config, size, expected):
    processor = read_image_processor(config)
    assert processor.crop_sizes(*size) == expected
    assert [crop.shape for crop in processor(rgb_of(*size)).crops] == [(3, *e) for e in expected]


def test_images_that_are_too_narrow_are_refused_by_their_size():
    read_image_processor(QWEN).layout(2000, 10)
    for height, width in ((2001, 10), (10, 2001)):
        with pytest.raises(UnsupportedModelError, match=f"an image of {width} x {height} pixels"):
            read_image_processor(QWEN).layout(height, width)


PLAIN = {"do_rescale": False, "do_normalize": False, "do_resize": False}


def pixels_of(config, rgb):
    """Each crop as bytes, (height, width, 3)."""
    crops = read_image_processor(config | PLAIN)(rgb).crops
    return [crop.transpose(1, 2, 0).astype(int) for crop in crops]


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((9, 12), slice(1, 7), slice(3, 9)),
        ((6, 6), slice(0, 6), slice(0, 6)),
        ((7, 7), slice(0, 6), slice(0, 6)),
    ],
)
def test_the_middle_of_an_image_is_cut_out(size, rows, columns):
    rgb = rgb_of(*size)
    (found,) = pixels_of(CLIP_50 | {"crop_size": 6}, rgb)
    assert (found == rgb[rows, columns]).all()


@pytest.mark.parametrize(
    ("size", "into", "out_of"),
    [
        ((3, 4), (slice(2, 5), slice(1, 5)), (slice(0, 3), slice(0, 4))),
        ((9, 4), (slice(0, 6), slice(1, 5)), (slice(1, 7), slice(0, 4))),
        ((3, 8), (slice(2, 5), slice(0, 6)), (slice(0, 3), slice(1, 7))),
    ],
)
def test_small_images_are_in_the_middle_of_black(size, into, out_of):
    rgb, expected = rgb_of(*size) | 1, np.zeros((6, 6, 3), int)
    expected[into] = rgb[out_of]
    (found,) = pixels_of(CLIP_50 | {"crop_size": 6}, rgb)
    assert (found == expected).all()


@pytest.mark.parametrize("size", [(3, 6), (6, 3)])
def test_images_are_made_square_in_the_mean_s_colour(size):
    rgb = rgb_of(*size)
    expected = np.full((6, 6, 3), [127, 63, 0])
    expected[(6 - size[0]) // 2 :, (6 - size[1]) // 2 :][: size[0], : size[1]] = rgb
    config = WHOLE | {"do_pad": True, "image_mean": [0.5, 0.25, 0]}
    (found,) = pixels_of(config, rgb)
    assert (found == expected).all()


def test_tiles_go_row_by_row_and_the_whole_image_is_last():
    rgb = rgb_of(16, 24)
    *tiles, whole = pixels_of(AS_IS, rgb)
    assert len(tiles) == 6 and whole.shape == (8, 8, 3)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, 3)
        assert (tile == rgb[8 * row :, 8 * column :][:8, :8]).all()


@pytest.mark.parametrize(("size", "top", "left"), [((2, 8), 2, 0), ((6, 2), 0, 3), ((3, 4), 0, 0)])
def test_tiles_of_llava_next_have_the_image_in_their_middle(size, top, left):
    """Of the only resolution, 6 rows of 8 columns; the tower's crops are as large as a tile."""
    config = NEXT | {"size": 2, "crop_size": 2, "image_grid_pinpoints": [[6, 8]]}
    *tiles, whole = pixels_of(config, np.full((*size, 3), 9, np.uint8))
    assert len(tiles) == 12 and whole.shape == (2, 2, 3)
    found = np.block([[[tiles[4 * r + c]] for c in range(4)] for r in range(3)])
    expected = np.zeros((6, 8), int)
    expected[top : 6 - top, left : 8 - left] = 9
    assert (found.max(-1) == expected).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [-1.0, -0.6, 1.0]),
        ({"do_normalize": False}, [0.0, 0.2, 1.0]),
        ({"do_rescale": False, "image_mean": [1, 1, 1], "image_std": [2, 2, 2]}, [-0.5, 25, 127]),
        ({"rescale_factor": 0.5, "do_normalize": False}, [0, 25.5, 127.5]),
    ],
)
def test_bytes_become_numbers(changes, expected):
    rgb = np.array([[[0] * 3, [51] * 3, [255] * 3]], np.uint8)
    (crop,) = read_image_processor(GEMMA3 | {"do_resize": False} | changes)(rgb).crops
    assert crop.dtype == np.float32
    np.testing.assert_allclose(crop, np.broadcast_to(expected, (3, 1, 3)), atol=1e-6)


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
