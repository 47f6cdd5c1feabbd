"""Named pipes, which POSIX has in folders."""

import os

import pytest


def make_pipe(path):
    """Puts one where a file would be."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("Windows has no named pipes in folders")
    os.mkfifo(path)
