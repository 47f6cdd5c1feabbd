"""Signals that ask a process to end."""

from __future__ import annotations

SAME_WISH = 1.0
"""Seconds within which several are one wish, sent to a process and to its whole group."""
