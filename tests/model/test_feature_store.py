"""Features of images: computed once per image and tower, in memory and on disk."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from support.image_models import rgb_of

from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.images.one_crop import Gemma3ImageProcessor
from qlora_wgpu.images.placeholders import ImageTokens
from qlora_wgpu.images.sources import ImageSource, RowContent
from qlora_wgpu.model import feature_store
from qlora_wgpu.model.feature_store import FeatureStore
from qlora_wgpu.model.image_inputs import ImageFeatures

WIDTH = 6


class Tower:
    """Features that follow from pixels."""

    def __init__(self, tokens=4):
        self.tokens, self.encoded, self.closed = tokens, 0, 0

    def encode(self, images):
        self.encoded += len(images)
        sums = [image.crops[0].sum(axis=(1, 2)) for image in images]
        rows = [np.resize(each, (self.tokens, WIDTH)).astype(np.float32) for each in sums]
        return [ImageFeatures(each, (2, 2)) for each in rows]

    def close(self):
        self.closed += 1


def tokens(processor=None):
    processor = processor or Gemma3ImageProcessor(8, 8)
    return ImageTokens("<i>", "<i>", "<i>", 7, processor, lambda *_: ("", 4))


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = {}
    for size in ((9, 5), (6, 8), (7, 7)):
        file = io.BytesIO()
        Image.fromarray(rgb_of(*size)).save(file, "PNG")
        image = ImageSource(f"image {size}", RowContent(file.getvalue())).measured()
        found[image.key] = image
    return found


def filled(images, cache="disk", tower=None, about="tower", processor=None):
    tower, store = tower or Tower(), FeatureStore(about, tokens(processor), cache)
    store.fill(images, lambda missing: tower, WIDTH)
    return store, tower


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_features_are_those_of_the_tower(images, cache):
    store, tower = filled(images, cache)
    for key, image in images.items():
        (expected,) = Tower().encode([tokens().processor(image.decoded())])
        assert np.array_equal(store[key].rows, expected.rows)
        assert store[key].grid == (2, 2)
    assert tower.encoded == 3 and tower.closed == 1


def test_a_later_run_computes_only_what_is_missing(images):
    some = dict(list(images.items())[:2])
    first, _ = filled(some)
    second, tower = filled(images)
    assert tower.encoded == 1
    assert np.array_equal(first[next(iter(some))].rows, second[next(iter(some))].rows)

    def opened(missing):
        raise AssertionError("the tower was opened")

    third = FeatureStore("tower", tokens())
    assert third.fill(images, opened, WIDTH) == 0
    assert all(key in third for key in images)


def test_another_tower_or_processor_has_features_of_its_own(images):
    filled(images)
    _, other = filled(images, about="another")
    _, resized = filled(images, processor=Gemma3ImageProcessor(8, 9))
    assert other.encoded == resized.encoded == 3


def test_damaged_features_are_computed_again_or_refused(images, tmp_path):
    store, _ = filled(images)
    paths = sorted((tmp_path / "cache").rglob("*.bin"))
    assert len(paths) == 3
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1
    paths[1].write_bytes(content)
    assert paths[0].stem not in store
    with pytest.raises(DataError, match="missing or damaged"):
        store[paths[1].stem]
    _, tower = filled(images)
    assert tower.encoded == 2
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [
        path.name for path in (tmp_path / "cache").rglob("*.bin")
    ]


def test_features_that_do_not_fit_the_tokens_are_refused(images):
    tower = Tower(tokens=5)
    with pytest.raises(DataError, match=r"has 4 tokens by processor_config.json, but its tower gi"):
        filled(images, tower=tower)
    assert tower.closed == 1


def test_without_room_on_the_disk_features_stay_in_memory(images, monkeypatch):
    monkeypatch.setattr(feature_store, "_LEFT_FREE", 1 << 60)
    store, _ = filled(images)
    assert "are not cached" in store.problem and all(key in store for key in images)
    monkeypatch.setattr(feature_store, "available_bytes", lambda: 100)
    with pytest.raises(ConfigError, match=r"too much for the 0\.0 GiB of available memory"):
        filled(images)
