"""Rows that a program hands over, in a form that can be gone through as often as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lasting(rows: Any) -> Any:
    """The rows of an iterator as a list, those of pandas' ``DataFrame`` as mappings.

    Everything else stays as it is.
    """
    if isinstance(rows, Iterator):  # gives each row once, and it is looked at before it is read
        return list(rows)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):
        return [_without_gaps(row) for row in rows.to_dict("records")]
    return rows


def _without_gaps(row: dict[Any, Any]) -> dict[str, Any]:
    """A row of a table, in which NaN stands where there is no value."""
    gaps = (key for key, value in row.items() if isinstance(value, float) and value != value)
    return {str(key): value for key, value in row.items()} | {str(key): None for key in gaps}
