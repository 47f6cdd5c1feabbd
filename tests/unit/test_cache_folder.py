"""One cache folder, where the operating system keeps such things, for its user's eyes only."""

import os
import stat
import sys
from pathlib import Path

import pytest

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.data.prepared import cache_folder
from qlora_wgpu.selfcheck import results
from qlora_wgpu.tuning import cache

linux = pytest.mark.skipif(sys.platform != "linux", reason="where others keep theirs differs")


@linux
def test_it_is_where_it_always_was(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_path("data") == tmp_path / ".cache" / "qlora-wgpu" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as if it were not set
    assert cache_path() == tmp_path / ".cache" / "qlora-wgpu"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_path() == tmp_path / "elsewhere" / "qlora-wgpu"


def test_everything_is_kept_in_it():
    places = (cache_folder(), results.cache_file(), cache.cache_file())
    assert [path.relative_to(cache_path()) for path in places] == [
        Path("data"), Path("checked.json"), Path("tuning.json")
    ]  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_nobody_else_looks_into_it(monkeypatch, tmp_path):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "a" / "b"))
    for _ in range(2):
        make_cache_folder(cache_path("data"))
        assert stat.S_IMODE(cache_path().stat().st_mode) == 0o700
        assert cache_path("data").is_dir()
        cache_path().chmod(0o755)  # as older versions left it
