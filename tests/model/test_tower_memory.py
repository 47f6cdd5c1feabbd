"""Vision towers within a device's memory: what is planned, and how little they can do with."""

from types import SimpleNamespace

import numpy as np
import pytest
from model.test_vision_encoder import config_of, crops, distances, images_of, saved

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.images.one_crop import (
    ClipImageProcessor,
    Gemma3ImageProcessor,
    Gemma4ImageProcessor,
    PixtralImageProcessor,
    Qwen2VLImageProcessor,
)
from qlora_wgpu.images.tiles import (
    Idefics3ImageProcessor,
    Lfm2VlImageProcessor,
    LlavaNextImageProcessor,
)
from qlora_wgpu.model import tower_memory
from qlora_wgpu.model.tower_memory import place_tower, placed_for
from qlora_wgpu.model.vision_encoder import VisionEncoder, batches, read_tower

CASE = "qwen3_vl"
GPU = SimpleNamespace(profile=GPU_PROFILE, max_binding=1 << 30, is_cpu=False)


def rows_of(case):
    """The crops of a case's images in the tower's rows."""
    tower = read_tower(config_of(case))
    return [[tower.rows(*crop.shape[1:]) for crop in own] for own in crops(case)]


def test_processors_know_the_sizes_of_crops_without_pixels():
    processors = (
        Idefics3ImageProcessor(56, 28),
        Idefics3ImageProcessor(20, 28),
        Idefics3ImageProcessor(56, 28, do_image_splitting=False),
        Qwen2VLImageProcessor(28 * 28, 28 * 28 * 9),
        Gemma3ImageProcessor(30, 20),
        ClipImageProcessor(28, (28, 20)),
        ClipImageProcessor(28, do_center_crop=False, do_pad=True),
        LlavaNextImageProcessor(
            ((40, 20), (20, 40)), (20, 20), 20, ClipImageProcessor(20, (20, 20))
        ),
        PixtralImageProcessor((40, 40), 8),
        Gemma4ImageProcessor(70, 4, 2),
        Lfm2VlImageProcessor((1, 4), 8, 4, 16),
        Lfm2VlImageProcessor((1, 4), 8, 4, 16, use_thumbnail=False),
    )  # fmt: skip
    for size in ((9, 5), (40, 61)):
        rgb = np.zeros((*size, 3), np.uint8)
        for processor in processors:
            found = [crop.shape[1:] for crop in processor(rgb).crops]
            assert list(processor.crop_sizes(*size)) == found, (processor, size)


def test_crops_are_processed_together_up_to_a_maximum():
    assert batches([3, 4, 9, 1, 1], 8) == [[3, 4], [9], [1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.4])
def test_memory_is_as_planned_also_with_streamed_layers(settled_device, tmp_path, share):
    """Streamed layers have the same features; the plan is what is allocated, to the byte."""
    folder, config = saved(CASE, tmp_path)
    free, limit = place_tower(config, "float32", settled_device, rows_of(CASE), None), None
    if share is not None:
        limit = int(share * free.memory.total())
    placed = place_tower(config, "float32", settled_device, rows_of(CASE), limit)
    assert (placed.plan.host_bytes > 0) == (share is not None)
    before = settled_device.memory.total
    with VisionEncoder(folder, config, settled_device, "float32", placed=placed) as encoder:
        found = encoder.encode(images_of(CASE))
        again = encoder.encode(images_of(CASE))
        taken = settled_device.memory.total - before
    assert max(distances(CASE, found)) <= 1e-5
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(again, found, strict=True))
    assert placed.memory.total() == taken <= (limit or taken)
    del placed
    assert settled_device.memory.total == before


def test_fewer_patches_at_once_come_before_streaming():
    config, rows = config_of("idefics3"), rows_of("idefics3") * 40
    whole = place_tower(config, "bfloat16", GPU, rows, None)
    less = place_tower(config, "bfloat16", GPU, rows, whole.memory.total() - 1)
    assert whole.most_patches == 4096 > less.most_patches and not less.plan.host_bytes
    assert not placed_for(whole) and "at most 512 patches are processed at once" in placed_for(less)
    one = place_tower(config, "bfloat16", GPU, [[max(max(rows))]], None)
    least = place_tower(config, "bfloat16", GPU, rows, one.memory.total() - 1)
    assert "layers take turns" in placed_for(least)


def test_what_does_not_fit_is_refused_by_its_size(monkeypatch):
    config, rows = config_of("gemma3"), [[2 * 64]]
    with pytest.raises(OutOfMemoryError, match=r"an image of 128 patches, with .* 0 MiB are avail"):
        place_tower(config, "bfloat16", GPU, rows, 1000)
    monkeypatch.setattr(tower_memory, "available_bytes", lambda: 0)
    software = SimpleNamespace(**{**vars(GPU), "is_cpu": True})
    with pytest.raises(OutOfMemoryError, match="of host memory, but only 0 MiB are free"):
        place_tower(config, "bfloat16", software, rows, None)
