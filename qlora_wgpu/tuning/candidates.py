"""The profiles that a tuner tries: each changes one thing about every family of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile
from qlora_wgpu.kernels import tunables
from qlora_wgpu.kernels.kernel import Tunable


def bases(profile: Profile) -> list[Profile]:
    """Profiles that differ in all kernels: the default, and the same without textures."""
    return [profile, CPU_PROFILE] if profile.textures else [profile]


def tunables_of(profile: Profile) -> list[Tunable]:
    """All that a tuner may change about a profile."""
    return [tunable for tunable in tunables() if tunable.changes(profile)]


def candidates(profile: Profile) -> list[Profile]:
    """Profiles to time: each changes one thing about every family of kernels at once.

    The families do not share launches, so one run times a change of each.
    """
    changes = [tunable.changes(profile) for tunable in tunables_of(profile)]
    profiles = []
    for index in range(max(map(len, changes), default=0)):
        merged: dict[str, Any] = {}
        for tried in changes:
            if index < len(tried):
                merged |= tried[index]
        profiles.append(replace(profile, **merged))
    return profiles


def fields_of(tunable: Tunable, base: Profile, profile: Profile) -> dict[str, Any]:
    """A profile's values of the fields that a tunable may change about its base."""
    names = {name for change in tunable.changes(base) for name in change}
    return {name: getattr(profile, name) for name in sorted(names)}
