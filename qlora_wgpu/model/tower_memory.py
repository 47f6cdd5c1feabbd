"""Places a vision tower within the memory of a device, before its weights are read.

If a device has too little memory, fewer patches are processed at once; if that is not enough, the
weights stay in host memory, and layers take turns on the device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from qlora_wgpu.errors import OutOfMemoryError, UnsupportedModelError
from qlora_wgpu.families.parts.vision import VisionTower
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.memory import available_bytes, room
from qlora_wgpu.images.placeholders import ImageTokens
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.vision_encoder import (
    IMAGES_AT_ONCE,
    MOST_PATCHES,
    PlacedTower,
    TowerPlan,
    batches,
)

Crops = Sequence[int]
"""The rows of each crop of an image in the tower's sequence."""


class Target(Protocol):
    """The GPU that a tower is placed on, an open one or a typical one."""

    @property
    def profile(self) -> Profile: ...

    @property
    def max_binding(self) -> int: ...

    @property
    def is_cpu(self) -> bool: ...


def crops_of(tower: VisionTower, tokens: ImageTokens, images: Iterable[ImageSource]) -> list[Crops]:
    """The crops of images, by their sizes alone."""
    sizes = [tokens.processor.crop_sizes(image.height, image.width) for image in images]
    return [[tower.rows(*size) for size in own] for own in sizes]


def free_bytes(device: Device) -> int | None:
    """Bytes of a device that are left of its budget, or as the driver reports; None if unknown."""
    if device.budget is not None:
        return device.budget - device.memory.total
    return room(device)


def place_tower(
    config: Mapping[str, Any],
    dtype: str,
    target: Target,
    images: Sequence[Crops],
    limit: int | None,
) -> PlacedTower:
    """Lays a tower out for all crops of some images, in their order.

    Args:
        config: The model's config.json.
        dtype: Type of matmul operands.
        target: The GPU.
        images: The crops of each image.
        limit: Bytes of the GPU that the tower may take; None for no limit.

    Raises:
        OutOfMemoryError: If it does not fit, or its weights do not fit into host memory.
        UnsupportedModelError: If the model has no tower that is supported.
    """
    smallest = None
    for streamed in (False, True):
        plan = TowerPlan(
            config, dtype, profile=target.profile, max_binding=target.max_binding,
            streamed=streamed,
        )  # fmt: skip
        for most in _candidates(max(rows for crops in images for rows in crops)):
            smallest = PlacedTower(plan, most, _sizes(plan, images, most))
            if limit is None or smallest.memory.total() <= limit:
                _check_host_memory(smallest, target)
                return smallest
    assert smallest is not None and limit is not None
    raise OutOfMemoryError(
        f"the vision tower needs {smallest.memory.total() / MIB:,.0f} MiB of device memory for an "
        f"image of {smallest.most_patches:,} patches, with its weights in host memory, but "
        f"{limit / MIB:,.0f} MiB are available: raise device.memory, or use smaller images"
    )


def planned_bytes(layout: ModelPlan, *, streamed: bool) -> int:
    """Bytes on the device of the tower of a model, for a full batch of patches.

    0 for a tower that is not supported, since images are refused then.
    """
    config = json.dumps(layout.pretrained.config, sort_keys=True)
    dtype, most = layout.compute_dtype, layout.max_binding
    try:
        return _planned_bytes(config, dtype, layout.profile, most, streamed=streamed)
    except UnsupportedModelError:
        return 0


@lru_cache(maxsize=8)
def _planned_bytes(
    config: str, dtype: str, profile: Profile, max_binding: int, *, streamed: bool
) -> int:
    plan = TowerPlan(
        json.loads(config), dtype, profile=profile, max_binding=max_binding, streamed=streamed
    )
    return plan.memory([plan.capacity(MOST_PATCHES)]).total()


def placed_for(tower: PlacedTower) -> str:
    """A sentence part on how a tower was made to fit; empty if nothing had to be done."""
    parts = []
    if tower.most_patches < MOST_PATCHES:
        parts.append(f"at most {tower.most_patches:,} patches are processed at once")
    if tower.plan.host_bytes:
        parts.append(
            f"its layers take turns on the device ({tower.plan.host_bytes / MIB:,.0f} MiB of "
            "weights in host memory)"
        )
    return " and ".join(parts)


def _candidates(largest: int) -> Iterator[int]:
    """Maximum numbers of patches at once, down to those of the largest crop."""
    most = MOST_PATCHES
    while most > largest:
        yield most
        most //= 2
    yield largest


def _sizes(plan: TowerPlan, images: Sequence[Crops], most: int) -> tuple[int, ...]:
    """The rows of all programs that run, the most first."""
    found = set()
    for first in range(0, len(images), IMAGES_AT_ONCE):
        crops = [rows for own in images[first : first + IMAGES_AT_ONCE] for rows in own]
        found |= {plan.capacity(sum(own)) for own in batches(crops, most)}
    return tuple(sorted(found, reverse=True))


def _check_host_memory(tower: PlacedTower, target: Target) -> None:
    needed = tower.plan.host_bytes + (tower.memory.total() if target.is_cpu else 0)
    free = available_bytes()
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"the vision tower needs {needed / MIB:,.0f} MiB of host memory, but only "
            f"{free / MIB:,.0f} MiB are free: end other programs, or use smaller images"
        )
