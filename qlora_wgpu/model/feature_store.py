"""The features of a run's images: computed once per image and tower, in memory or on disk.

On disk they are a folder of the user's cache per tower and processor, with a file for each image,
which all runs with the same base share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.checkpoint.atomic import write_cache_pieces
from qlora_wgpu.errors import ConfigError, DataError, reason
from qlora_wgpu.files import file_bytes, is_dir, open_file
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import available_bytes
from qlora_wgpu.images.pixels import ProcessedImage
from qlora_wgpu.images.placeholders import ImageFiles, ImageTokens, counted
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.limits import GIB, MIB
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.tower_memory import crops_of, free_bytes, place_tower
from qlora_wgpu.model.vision_encoder import IMAGES_AT_ONCE, PlacedTower, VisionEncoder, read_tower

ImageCache = Literal["memory", "disk"]

_VERSION = 1  # of the files
_KEPT = 4  # towers in the cache
_LEFT_FREE = 1024 * MIB  # on the disk
_SHARE = 0.5  # of the available memory that features may take
_HEADER = 4096  # bytes, at most


class Encoder(Protocol):
    """A frozen vision tower on a device."""

    def encode(self, images: Sequence[ProcessedImage]) -> list[ImageFeatures]:
        """The features of some images."""

    def close(self) -> None:
        """Frees its memory."""


class FeatureStore:
    """The features of images by their keys."""

    def __init__(self, tower: str, tokens: ImageTokens, cache: ImageCache = "disk") -> None:
        """Opens the store of a tower's hash and a model's processor."""
        about = json.dumps([_VERSION, tower, repr(tokens.processor)])
        self.key = hashlib.sha256(about.encode()).hexdigest()[:32]  # of tower and processor
        self._tokens = tokens
        self._folder: Path | None = None
        self._known: dict[str, ImageFeatures] = {}
        self.problem = ""  # why nothing is written to disk
        if cache == "disk":
            self._folder = cache_path("images", self.key)

    def __contains__(self, key: str) -> bool:
        return key in self._known or self._read_header(key) is not None

    def __getitem__(self, key: str) -> ImageFeatures:
        """An image's features.

        Raises:
            DataError: If they are missing or damaged.
        """
        if key in self._known:
            return self._known[key]
        features = self._read(key)
        if features is None:
            self._remove(key)
            raise DataError(
                f"the features of an image are missing or damaged in {self._folder}: start the "
                "run again to compute them"
            )
        return features

    def fill(
        self,
        images: Mapping[str, ImageSource],
        opened: Callable[[Sequence[ImageSource]], Encoder],
        width: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Computes what is missing, with a tower that is opened only if something is.

        Args:
            images: All images by their keys.
            opened: Opens the tower for the images that are missing; it is closed at the end.
            width: Numbers in a row of features.
            progress: Called with the number of images done, and of all that are missing.

        Returns:
            The number of images that were computed.

        Raises:
            DataError: If an image cannot be read, or the tower's features do not fit its tokens.
            ConfigError: If there is not enough room for the features.
        """
        missing = [image for key, image in images.items() if key not in self]
        if not missing:
            return 0
        self._make_room(4 * width * sum(map(self._tokens.count, missing)))
        encoder = opened(missing)
        try:
            for first in range(0, len(missing), IMAGES_AT_ONCE):
                progress(first, len(missing))
                for image, features in self._encoded(
                    encoder, missing[first : first + IMAGES_AT_ONCE]
                ):
                    self._keep(image.key, features)
        finally:
            encoder.close()
        return len(missing)

    def _encoded(
        self, encoder: Encoder, images: Sequence[ImageSource]
    ) -> Iterator[tuple[ImageSource, ImageFeatures]]:
        processed = [self._tokens.processor(image.decoded()) for image in images]
        for image, features in zip(images, encoder.encode(processed), strict=True):
            expected = self._tokens.count(image)
            if len(features.rows) != expected:
                raise DataError(
                    f"{image.name} has {expected} tokens by processor_config.json, but its tower "
                    f"gives {len(features.rows)}: these files belong to different models"
                )
            if not np.isfinite(features.rows).all():
                raise DataError(
                    f"the vision tower's features of {image.name} are not finite: its weights are "
                    "damaged"
                )
            yield image, features

    # -- memory and disk -----------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        if self._folder is not None:
            try:
                make_cache_folder(self._folder)
                os.utime(self._folder)  # used just now
                _forget_oldest(self._folder.parent)
                free = shutil.disk_usage(self._folder).free
            except OSError as err:
                self._fail(reason(err))
            else:
                if nbytes + _LEFT_FREE <= free:
                    return
                self._fail(
                    f"{nbytes / GIB:.1f} GiB are needed, and {free / GIB:.1f} GiB are free, of "
                    f"which {_LEFT_FREE / GIB:.0f} GiB must stay free"
                )
        available = available_bytes()
        if available is not None and nbytes > _SHARE * available:
            advice = self.problem or "set data.image_cache: disk, or use fewer or smaller images"
            raise ConfigError(
                f"the images' features take {nbytes / GIB:.1f} GiB, too much for the "
                f"{available / GIB:.1f} GiB of available memory: {advice}"
            )

    def _fail(self, why: str) -> None:
        self.problem = (
            f"the features of images are not cached in {cache_path('images')} ({why}): the next "
            "run computes them again"
        )
        self._folder = None

    def _keep(self, key: str, features: ImageFeatures) -> None:
        if self._folder is not None:
            rows = np.ascontiguousarray(features.rows, np.float32)
            header = json.dumps({
                "shape": rows.shape,
                "grid": features.grid,
                "crc32": zlib.crc32(rows.data),
            })  # fmt: skip
            pieces = header.encode() + b"\n", rows.data
            if problem := write_cache_pieces(self._path(self._folder, key), pieces):
                self._fail(problem)
            elif key in self:
                return
        self._known[key] = features  # also while another process writes the same image

    def _remove(self, key: str) -> None:
        """Removes a damaged file, so that the next run computes it again."""
        if self._folder is not None:
            with suppress(OSError):
                self._path(self._folder, key).unlink()

    def _path(self, folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.bin"

    def _read_header(self, key: str) -> tuple[int, int] | None:
        """The shape of an image's features on disk; None if they are missing or incomplete."""
        if self._folder is None:
            return None
        path = self._path(self._folder, key)
        if not is_own(path):
            return None
        try:
            with open_file(path) as file:
                line = file.readline(_HEADER)
                size = os.fstat(file.fileno()).st_size
            rows, width = map(int, json.loads(line)["shape"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return (rows, width) if size == len(line) + 4 * rows * width else None

    def _read(self, key: str) -> ImageFeatures | None:
        shape = self._read_header(key)
        if shape is None or self._folder is None:
            return None
        try:
            line, _, data = file_bytes(
                self._path(self._folder, key), _HEADER + 4 * shape[0] * shape[1]
            ).partition(b"\n")
            header = json.loads(line)
            if header["crc32"] != zlib.crc32(data):
                return None
            grid = header["grid"]
            rows = np.frombuffer(data, np.float32).reshape(shape)
            return ImageFeatures(rows, None if grid is None else (int(grid[0]), int(grid[1])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def opened_tower(
    base: Pretrained, tokens: ImageTokens, device: Device, dtype: str,
    images: Sequence[ImageSource], placed: Callable[[PlacedTower], None] = lambda tower: None,
) -> VisionEncoder:  # fmt: skip
    """A base's tower on a device for some images, within the memory that is free.

    ``placed`` gets its plan before weights are read.
    """
    assert base.folder is not None
    crops = crops_of(read_tower(base.config), tokens, images)
    tower = place_tower(base.config, dtype, device, crops, free_bytes(device))
    placed(tower)
    return VisionEncoder(base.folder, base.config, device, dtype, placed=tower)


_PROMPTS = 64  # images of prompts whose features are kept


def prompt_features(
    base: Pretrained, files: ImageFiles, device: Device, dtype: str
) -> Callable[[Sequence[ImageSource]], list[ImageFeatures]]:
    """Encodes the images of prompts; the tower is on the device only for images that are new."""
    known: dict[str, ImageFeatures] = {}
    layout = base.architecture.images
    assert layout is not None
    width = (1 + layout.deepstack) * base.architecture.hidden_size

    def features(images: Sequence[ImageSource]) -> list[ImageFeatures]:
        with device.in_turn:
            store = FeatureStore("", files.tokens, "memory")
            missing = {image.key: image for image in images if image.key not in known}
            opened = partial(opened_tower, base, files.tokens, device, dtype)
            store.fill(missing, opened, width)
            known.update({key: store[key] for key in missing})
            found = [known[image.key] for image in images]
            for key in list(known)[:-_PROMPTS]:
                del known[key]
        return found

    return features


def described(computed: int, images: int) -> str:
    """How many images were encoded, and how many were known, in words."""
    if not computed:
        return f"{counted(images)}: features are cached"
    return f"{counted(images)}: {computed} encoded, {images - computed} cached"


def _forget_oldest(cache: Path) -> None:
    """Deletes the features of all but the towers used last."""
    folders = [path for path in cache.iterdir() if is_dir(path)]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
        with suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)
