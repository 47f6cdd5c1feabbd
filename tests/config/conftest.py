"""What tests of configuration files share."""

from __future__ import annotations

import pytest

from qlora_wgpu.config import load_config


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Reads a text as the file of a folder, from another folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    folder = tmp_path / "conf"
    folder.mkdir()

    def run(text, overrides=(), name="run.yaml"):
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path, overrides)

    return run
