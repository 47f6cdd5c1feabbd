"""What a tuner may change about a profile, and which kernels each change concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile

Change = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Kernels that share tunables.

    Attributes:
        name: Shown to users.
        labels: How the labels of their launches begin.
        changes: Fields of a profile to try; the profile as it is is always tried too.
    """

    name: str
    labels: tuple[str, ...]
    changes: tuple[Change, ...]


_IMAGE_GROUPS = (
    Group(
        "products",
        ("gemm/", "lm_head/"),
        (
            {"image_nt_rows": 16},
            {"image_nt_rows": 32, "image_nn_rows": 8},
            {"image_nt_rows": 16, "image_nn_rows": 8},
        ),
    ),
)
_CPU_GROUPS = (
    Group(
        "products",
        ("gemm/", "lm_head/"),
        ({"gemm_tile": 8}, {"gemm_tile": 16, "gemm_group": (16, 1)}),
    ),
)
_GPU_PRODUCTS: tuple[Change, ...] = (
    {"gemm_kind": "tiled", "tile_group": (16, 16)},
    {"gemm_kind": "tiled", "tile_group": (8, 8)},
    {"gemm_kind": "tiled", "tile_group": (16, 8)},
    {"gemm_kind": "register", "gemm_tile": 4, "gemm_group": (16, 8)},
    {"gemm_kind": "register", "gemm_tile": 8, "gemm_group": (16, 4)},
    {"gemm_kind": "register", "gemm_tile": 16, "gemm_group": (8, 8)},
)
_MATRIX_PRODUCTS: tuple[Change, ...] = (
    {"matrix_tile": (2, 2, 4, 4)},
    {"matrix_tile": (2, 2, 2, 2)},
    {"matrix_tile": (2, 4, 2, 2)},
    {"matrix_tile": (4, 2, 2, 4)},
)
_GPU_OTHERS = (
    Group(
        "adapter",
        ("lora/",),
        (
            {"lora_lanes": 32, "lora_grad_group": (8, 32)},
            {"lora_lanes": 128, "lora_grad_group": (32, 8)},
            {"lora_lanes": 64, "lora_grad_group": (64, 4)},
        ),
    ),
    Group(
        "attention",
        ("attention/",),
        (
            {"attention_lanes": 64, "attention_keys": 4},
            {"attention_lanes": 32, "attention_keys": 8},
            {"attention_lanes": 64, "attention_keys": 2},
        ),
    ),
    Group(
        "rows",
        ("rms_norm/", "cross_entropy/"),
        ({"row_lanes": 32}, {"row_lanes": 64}, {"row_lanes": 256}),
    ),
)


def bases(profile: Profile) -> list[Profile]:
    """Profiles that differ in all kernels: the default, and the same without images."""
    return [profile, CPU_PROFILE] if profile.images else [profile]


def groups_of(profile: Profile) -> tuple[Group, ...]:
    """What may be changed about a profile."""
    if profile.images:
        return _IMAGE_GROUPS
    if profile.name == "cpu":
        return _CPU_GROUPS
    products = _GPU_PRODUCTS
    if profile.matrix:
        products = (*_MATRIX_PRODUCTS, {"gemm_kind": "register"}, *_GPU_PRODUCTS[:2])
    return (Group("products", ("gemm/", "lm_head/"), products), *_GPU_OTHERS)


def candidates(profile: Profile) -> list[Profile]:
    """Profiles to time: each changes one thing in every group at once.

    The groups concern different kernels, so one run times a change of each.
    """
    groups = groups_of(profile)
    found = []
    for index in range(max(len(group.changes) for group in groups)):
        merged: dict[str, Any] = {}
        for group in groups:
            if index < len(group.changes):
                merged |= group.changes[index]
        found.append(replace(profile, **merged))
    return found


def fields_of(group: Group, profile: Profile) -> dict[str, Any]:
    """A profile's values of the fields that a group may change."""
    names = {name for change in group.changes for name in change}
    return {name: getattr(profile, name) for name in sorted(names)}
