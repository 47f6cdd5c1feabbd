"""The images of a run: their features before training, and those of each micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.feature_store import FeatureStore, ImageCache, described, opened_tower
from qlora_wgpu.model.image_inputs import ImageFeatures, ImageInputs, image_inputs
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.tower_memory import placed_for
from qlora_wgpu.model.vision_encoder import PlacedTower, VisionEncoder
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

    The tower is on the device only meanwhile. The observer gets a note of its memory plan.
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

    def placed(tower: PlacedTower) -> None:
        observer.note(planned_tower(tower.memory, placed_for(tower)))
        observer.activity("loading the vision tower")

    def opened(missing: Sequence[ImageSource]) -> VisionEncoder:
        return opened_tower(base, files.tokens, device, dtype, missing, placed)

    computed = store.fill(images, opened, width, progress)
    observer.activity("")
    observer.note(described(computed, len(images)))
    if store.problem:
        observer.warning(store.problem)
    return store


def planned_tower(memory: Counter[str], how: str) -> str:
    """A sentence on a vision tower's memory, which is freed once the images are encoded."""
    kinds = ", ".join(f"{kind} {nbytes / MIB:,.1f}" for kind, nbytes in memory.most_common(3))
    return (
        f"planned device memory of the vision tower {memory.total() / MIB:,.1f} MiB, freed once "
        f"the images are encoded: {kinds}" + (how and f"; {how}")
    )


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


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of micro-batches, from the features of all images of a run.

    Batches in which no row has any are steps with images, too.
    """

    features: Features
    of: Architecture

    def __call__(self, rows: Sequence[Sequence[Example]], ids: Any, mask: Any) -> ImageInputs:
        """The images of a micro-batch's rows, with its ids and mask; others are padding."""
        found = [[self.features[key] for e in row for key in e.images] for row in rows]
        return image_inputs(ids, mask, [*found, *[[]] * (len(ids) - len(found))], self.of)

    @property
    def placeholder(self) -> int:
        """The id of the token that a row of features replaces."""
        assert self.of.images is not None
        return self.of.images.token_id

    @property
    def key(self) -> str:
        """A hash of what the features depend on, in addition to the base and the images."""
        return self.features.key if isinstance(self.features, FeatureStore) else ""
