"""Keys that had another name once, and are still read under it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

_NEW_NAMES = {"device": {"adapter": "gpu"}}


class RenamedKeyWarning(FutureWarning):
    """A key is written under the name that it used to have."""


def new_names(section: str) -> Mapping[str, str]:
    """The new names of a section's keys by their old ones."""
    return _NEW_NAMES.get(section, {})


def new_name(section: str, key: str) -> str:
    """The present name of a key; warns where that is another one."""
    new = new_names(section).get(key)
    if new is None:
        return key
    warnings.warn(
        f"{section}.{key} is now called {section}.{new}; the old name is still read",
        RenamedKeyWarning,
        stacklevel=2,
    )
    return new


def with_new_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values under the names that keys have now.

    Where both names are given, the old one is left, to be refused as unknown.
    """
    old = {k for k, new in new_names(section).items() if new not in values}
    return {new_name(section, k) if k in old else k: value for k, value in values.items()}
