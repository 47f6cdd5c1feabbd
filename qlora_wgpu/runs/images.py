"""The images of a command: what they become in prompts, and their features by the vision tower."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.config import Config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.model.feature_store import Encoder, FeatureStore, described
from qlora_wgpu.runs.opening import OpenedModel, device_of
from qlora_wgpu.training import Observer


def check_images(settings: Config, images: Mapping[str, ImageSource]) -> None:
    """Refuses a run with images that is not supported."""
    if images and settings.cluster.scheduler is not None:
        raise ConfigError(
            "cluster.scheduler does not support rows with images: remove it to train on one GPU"
        )


def encoded_images(
    settings: Config,
    source: OpenedModel,
    images: Mapping[str, ImageSource],
    device: Device,
    observer: Observer,
) -> FeatureStore | None:
    """The features of images, which the tower computes if they are not cached; None without images.

    The tower is on the device only meanwhile.
    """
    if not images:
        return None
    assert source.images is not None and source.pretrained.folder is not None
    tokens, layout = source.images.tokens, source.architecture.images
    assert layout is not None
    dtype = settings.train.compute_dtype
    tower = f"{source.pretrained.folder.identity} {dtype}"  # without reading its weights
    store = FeatureStore(tower, tokens, settings.data.image_cache)
    width = (1 + layout.deepstack) * source.architecture.hidden_size

    def progress(done: int, total: int) -> None:
        observer.activity(f"encoding images: {done:,} of {total:,}")

    observer.activity("opening the vision tower")
    computed = store.fill(images, lambda: _opened_tower(source, device, dtype), width, progress)
    observer.activity("")
    observer.note(described(computed, len(images)))
    if store.problem:
        observer.warning(store.problem)
    return store


def images_with_own_device(
    settings: Config, source: OpenedModel, images: Mapping[str, ImageSource], observer: Observer
) -> FeatureStore | None:
    """The same, on a device that is only opened if there are images, and freed afterwards."""
    if not images:
        return None
    return encoded_images(settings, source, images, device_of(settings.device), observer)


def _opened_tower(source: OpenedModel, device: Device, dtype: str) -> Encoder:
    from qlora_wgpu.model.vision_encoder import VisionEncoder

    base = source.pretrained
    encoder: Encoder = VisionEncoder(base.folder, base.config, device, dtype)
    return encoder
