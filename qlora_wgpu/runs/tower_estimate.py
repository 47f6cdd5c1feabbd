"""The memory of a vision tower, which encodes a run's images before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.errors import ConfigError, OutOfMemoryError, UnsupportedModelError, option
from qlora_wgpu.families.parts.vision import VisionTower
from qlora_wgpu.families.parts.vision_positions import FixedPositions, FractionalPositions
from qlora_wgpu.files import exists, is_file
from qlora_wgpu.images.placeholders import ImageTokens, image_files
from qlora_wgpu.images.sources import ImageSource, RowContent
from qlora_wgpu.limits import LONGEST_SIDE
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.tower_memory import Crops, Target, crops_of, place_tower, placed_for
from qlora_wgpu.model.vision_encoder import MOST_PATCHES, read_tower
from qlora_wgpu.runs.workload import TrainingWorkload


@dataclass(frozen=True)
class TowerEstimate:
    """What a vision tower needs, before training; it is freed before the model is loaded.

    Attributes:
        memory: Bytes on the GPU by kind, while it encodes the largest batch of images.
        host_bytes: Bytes of its weights that are kept in host memory.
        images: The number of images.
        tokens: Tokens of the image with the most.
        feature_bytes: Bytes of the features of all images, which are kept in the cache folder or in
            host memory (``data.image_cache``).
        how: How it is made to fit into the budget; empty if it fits as it is.
        problem: Why it does not fit; empty if it does.
    """

    memory: Counter[str]
    host_bytes: int
    images: int
    tokens: int
    feature_bytes: int
    how: str = ""
    problem: str = ""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.memory.total()


@dataclass(frozen=True)
class DataImages:
    """The images of a run's rows."""

    tokens: ImageTokens
    sources: Mapping[str, ImageSource]


def estimate_tower(
    workload: TrainingWorkload, path: str, target: Target, limit: int | None,
    images: DataImages | tuple[int, int],
) -> TowerEstimate:  # fmt: skip
    """Plans the tower for the images of a run, or for one image of a width and a height.

    ``path`` is the base's, whose folder may have its processor's settings. Without these, an image
    of a given size keeps it, or gets the only one that the tower reads.
    """
    base, dtype = workload.pretrained, workload.compute_dtype
    if not isinstance(images, DataImages):
        found = _image_of(base, path, *images)
        if not isinstance(found, DataImages):
            tower = read_tower(base.config)
            count = sum(rows // tower.merge**2 - tower.skip for rows in found)
            return _planned(base, dtype, target, limit, [found], [count])
        images = found
    sources = images.sources.values()
    crops = crops_of(read_tower(base.config), images.tokens, sources)
    counts = [images.tokens.count(image) for image in sources]
    return _planned(base, dtype, target, limit, crops, counts)


def _image_of(base: Pretrained, path: str, width: int, height: int) -> DataImages | Crops:
    """An image of this size, or its crops if the processor's settings are missing."""
    for side in (width, height):
        if type(side) is not int or not 0 < side <= LONGEST_SIDE:
            raise ConfigError(f"image must be a width and a height in pixels, got {side!r}")
    if base.architecture.images is None:
        kind = base.config.get("model_type")
        raise ConfigError(
            f"a model of model_type '{kind}' reads no images: leave out {option('image', ...)}"
        )
    is_on_hub = name_on_hub(path) is not None and not exists(Path(path))
    folder = ModelFolder.without_weights(path).path if is_on_hub else Path(path).expanduser()
    files = image_files(folder.parent if is_file(folder) else folder, base.config, str)
    try:
        tokens = None if files is None else files.tokens
    except UnsupportedModelError:
        tokens = None  # without preprocessor_config.json
    if tokens is None:
        return _crops_by_config(read_tower(base.config), width, height)
    image = ImageSource("the image", RowContent(b""), "", height, width)  # its size is enough
    return DataImages(tokens, {"": image})


def _crops_by_config(tower: VisionTower, width: int, height: int) -> Crops:
    """As many tiles as are processed at once, of towers that read tiles."""
    at = tower.positions
    if not isinstance(at, FixedPositions | FractionalPositions):
        unit = tower.merge * tower.embedding.patch_size
        sides = (max(round(side / unit), 1) * unit for side in (height, width))
        return [tower.rows(*sides)]
    side = at.side * tower.embedding.patch_size
    rows = tower.rows(side, side)
    is_tiled = isinstance(at, FractionalPositions) or tower.newline
    return [rows] * (max(MOST_PATCHES // rows, 1) if is_tiled else 1)


def _planned(
    base: Pretrained, dtype: str, target: Target, limit: int | None,
    crops: Sequence[Crops], counts: Sequence[int],
) -> TowerEstimate:  # fmt: skip
    layout = base.architecture.images
    assert layout is not None
    width = (1 + layout.deepstack) * base.architecture.hidden_size
    about = len(counts), max(counts), 4 * width * sum(counts)
    try:
        placed = place_tower(base.config, dtype, target, crops, limit)
    except OutOfMemoryError as err:
        free = place_tower(base.config, dtype, target, crops, None)
        return TowerEstimate(free.memory, 0, *about, problem=str(err))
    how = placed_for(placed)
    return TowerEstimate(placed.memory, placed.plan.host_bytes, *about, how)
