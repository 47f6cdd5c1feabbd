"""One cache folder, where the operating system keeps such things, for its user's eyes only."""

import os
import stat
import sys
from pathlib import Path

import pytest

from qlora_wgpu.cache_folder import (
    cache_path,
    cache_problem,
    make_cache_folder,
    read_json,
)
from qlora_wgpu.checkpoint.atomic import write_cache_file
from qlora_wgpu.data.prepared import cache_folder
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.adapters import widen_software_vectors
from qlora_wgpu.selfcheck import results
from qlora_wgpu.tuning import cache

FLAGS = b"flags : fpu avx2 avx512f avx512dq avx512bw avx512vl\n"
AMD = b"vendor_id : AuthenticAMD\n" + FLAGS
INTEL = b"vendor_id : GenuineIntel\n" + FLAGS

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


def test_windows_and_macs_are_told_of_another_folder_in_the_same_way(monkeypatch, tmp_path):
    monkeypatch.setattr("qlora_wgpu.cache_folder._READS_XDG", True)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "usual"))
    monkeypatch.setenv("XDG_CACHE_HOME", " ")
    assert cache_path("data") == tmp_path / "usual" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_path("data") == tmp_path / "elsewhere" / "qlora-wgpu" / "data"


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


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def spoil(home, how):
    """A cache folder that cannot be used, even by root."""
    if how == "a file instead":
        (home / "cache").write_text("")
    elif how == "a file below":
        (home / "cache" / "qlora-wgpu").mkdir(parents=True)
        (home / "cache" / "qlora-wgpu" / "data").write_text("")
    else:
        (home / "cache").symlink_to("/proc/self")


@linux
@pytest.mark.parametrize("how", ["a file instead", "a file below", "no file system for it"])
def test_a_cache_that_cannot_be_used_is_told_in_one_sentence(home, how):
    assert cache_problem() is None
    for path in sorted(home.rglob("*"), reverse=True):
        path.rmdir()
    spoil(home, how)
    problem = cache_problem()
    assert problem.startswith(f"the cache folder {home}/cache/qlora-wgpu cannot be used (")
    assert "\n" not in problem and "XDG_CACHE_HOME" in problem
    write_cache_file(cache_path("tuning.json"), "[1]")  # goes on without
    assert read_json(cache_path("tuning.json")) in ([1], None)


@linux
def test_without_a_home_folder_nothing_is_kept_in_the_present_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: "~/.cache/qlora-wgpu")
    assert "not an absolute path" in cache_problem()
    write_cache_file(cache_path("tuning.json"), "[1]")
    assert not list(tmp_path.iterdir())
    (tmp_path / "~" / ".cache" / "qlora-wgpu").mkdir(parents=True)
    (tmp_path / "~" / ".cache" / "qlora-wgpu" / "tuning.json").write_text("[1]")
    assert read_json(cache_path("tuning.json")) is None  # nor read there


@linux
def test_a_user_without_a_home_folder(monkeypatch):
    def nowhere(*_, **__):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_cache_dir", nowhere)
    assert "not an absolute path" in cache_problem()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has no such owners")
def test_a_cache_of_another_user_is_not_trusted(monkeypatch, home):
    write_cache_file(cache_path("tuning.json"), "[1]")
    assert read_json(cache_path("tuning.json")) == [1]
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert read_json(cache_path("tuning.json")) is None
    assert "belongs to another user" in cache_problem()


def test_what_is_no_json_is_nothing(home):
    write_cache_file(cache_path("tuning.json"), "[1]")
    for text in ("{", "[" * 100_000, "\udcff"):
        cache_path("tuning.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert read_json(cache_path("tuning.json")) is None


def test_mesa_keeps_no_shaders_where_it_cannot(monkeypatch, home):
    monkeypatch.setattr("qlora_wgpu.gpu.adapters.file_bytes", lambda *_: AMD)
    spoil(home, "a file instead")
    environ = {}
    widen_software_vectors(environ)
    assert environ.pop("LP_NATIVE_VECTOR_WIDTH") == "512"
    assert environ == {"MESA_SHADER_CACHE_DISABLE": "true"}


@pytest.mark.parametrize("cpu", [b"", INTEL, AMD.replace(b"avx512vl", b"")])
def test_mesa_keeps_its_width_where_nothing_is_gained(monkeypatch, home, cpu):
    monkeypatch.setattr("qlora_wgpu.gpu.adapters.file_bytes", lambda *_: cpu)
    environ = {}
    widen_software_vectors(environ)
    assert environ == {}


@pytest.mark.parametrize("width", ["64", "384", "1024", "0", "-1", "0x100000"])
def test_a_width_with_which_mesa_crashes_is_refused(home, width):
    with pytest.raises(DeviceError, match=rf"must be 128, 256 or 512, got {width}, .*unset it"):
        widen_software_vectors({"LP_NATIVE_VECTOR_WIDTH": width})


@pytest.mark.parametrize("width", ["0x80", "256", "512", "wide", ""])
def test_what_mesa_reads_as_a_good_width_or_none_is_not_refused(home, width):
    environ = {"LP_NATIVE_VECTOR_WIDTH": width}
    widen_software_vectors(environ)
    assert environ["LP_NATIVE_VECTOR_WIDTH"] == width


def test_a_width_of_the_user_shares_no_shaders(monkeypatch, home):
    monkeypatch.setattr("qlora_wgpu.gpu.adapters.file_bytes", lambda *_: INTEL)
    environ = {"LP_NATIVE_VECTOR_WIDTH": "128"}
    widen_software_vectors(environ)
    assert environ["LP_NATIVE_VECTOR_WIDTH"] == "128"
    assert Path(environ["MESA_SHADER_CACHE_DIR"]).name == "mesa-128"
