"""The images of a command: what they become in prompts, and their features by the vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

from qlora_wgpu.config import Config
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.model.feature_store import FeatureStore
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.runs.opening import OpenedModel, device_of
from qlora_wgpu.training import Observer
from qlora_wgpu.training.images import Features, encoded_images


def features_of(
    settings: Config,
    source: OpenedModel,
    images: Mapping[str, ImageSource],
    device: Device,
    observer: Observer,
) -> FeatureStore | None:
    """The features of images with the settings of a run; None without images."""
    dtype, cache = settings.train.compute_dtype, settings.data.image_cache
    return encoded_images(source.pretrained, source.images, images, device, dtype, cache, observer)


def images_with_own_device(
    settings: Config, source: OpenedModel, images: Mapping[str, ImageSource], observer: Observer
) -> FeatureStore | None:
    """The same, on a device that is only opened if there are images, and freed afterwards."""
    if not images:
        return None
    return features_of(settings, source, images, device_of(settings.device), observer)


class ImagesOfPrompt(Sequence[ImageFeatures]):
    """The features of a prompt's images, which are read from the store on each access."""

    def __init__(self, features: Features, keys: Sequence[str]) -> None:
        self._features = features
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> ImageFeatures: ...
    @overload
    def __getitem__(self, index: slice) -> list[ImageFeatures]: ...
    def __getitem__(self, index: int | slice) -> ImageFeatures | list[ImageFeatures]:
        if isinstance(index, slice):
            return [self._features[key] for key in self._keys[index]]
        return self._features[self._keys[index]]
