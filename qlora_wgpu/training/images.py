"""The images of a run: their features before training, and those of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.model.feature_store import FeatureStore, ImageCache, described
from qlora_wgpu.model.image_inputs import ImageFeatures, ImageInputs, image_inputs
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.vision_encoder import VisionEncoder
from qlora_wgpu.training.observers import Observer

Features = Mapping[str, ImageFeatures] | FeatureStore
"""The features of a run's images by their keys."""


def encoded_images(
    base: Pretrained,
    files: ImageFiles | None,
    images: Mapping[str, ImageSource],
    device: Device,
    dtype: str,
    cache: ImageCache,
    observer: Observer,
) -> FeatureStore | None:
    """The features of images, which the tower computes if they are not cached; None without images.

    The tower is on the device only meanwhile.
    """
    if not images:
        return None
    layout, folder = base.architecture.images, base.folder
    assert files is not None and folder is not None  # rows have some
    if layout is None:
        raise UnsupportedModelError(
            "config.json: images require a valid mrope_section (Qwen) or pad_token_id (Gemma 4)"
        )
    tower = f"{folder.identity} {dtype}"  # without reading its weights
    store = FeatureStore(tower, files.tokens, cache)
    width = (1 + layout.deepstack) * base.architecture.hidden_size

    def progress(done: int, total: int) -> None:
        observer.activity(f"encoding images: {done:,} of {total:,}")

    def opened() -> VisionEncoder:
        observer.activity("loading the vision tower")
        return VisionEncoder(folder, base.config, device, dtype)

    computed = store.fill(images, opened, width, progress)
    observer.activity("")
    observer.note(described(computed, len(images)))
    if store.problem:
        observer.warning(store.problem)
    return store


def images_of(*datasets: Dataset | None) -> dict[str, ImageSource]:
    """All images of some data sets by their keys."""
    given = [dataset for dataset in datasets if dataset is not None]
    return {key: image for dataset in given for key, image in dataset.image_sources.items()}


def prompt_images(
    example: Example, length: int, dataset: Dataset, images: ImageFiles | None
) -> tuple[int, tuple[str, ...]]:
    """A prompt of an example's first tokens, longer if that would cut an image, and its images."""
    if not example.images or images is None:
        return length, ()
    sources = dataset.image_sources
    places = np.flatnonzero(example.input_ids == images.tokens.token_id)
    ends = np.cumsum([images.tokens.count(sources[key]) for key in example.images])
    begun = int((places < length).sum())
    count = int(np.searchsorted(ends, begun))  # of images, the last one perhaps in part
    if not begun:
        return length, ()
    return max(length, int(places[ends[count] - 1]) + 1), example.images[: count + 1]


FeaturesOfBatch = Callable[[Sequence[Sequence[Example]], Any, Any], ImageInputs | None]
"""The images of a micro-batch's rows, with its ids and mask; rows beyond them are padding."""


def without_images(rows: Sequence[Sequence[Example]], ids: Any, mask: Any) -> None:
    """Those of runs without images."""


def with_images(features: Features, of: Architecture) -> FeaturesOfBatch:
    """Those of runs with images; batches in which no row has any are steps with images, too."""

    def inputs(rows: Sequence[Sequence[Example]], ids: Any, mask: Any) -> ImageInputs:
        found = [[features[key] for example in row for key in example.images] for row in rows]
        return image_inputs(ids, mask, [*found, *[[]] * (len(ids) - len(found))], of)

    return inputs
