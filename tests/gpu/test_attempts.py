"""What a driver crashes at is not tried for ever, and what it comes through counts for nothing."""

import os
import subprocess
import sys

import pytest
from support.chosen_profiles import opened

from qlora_wgpu.cache_folder import cache_path
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu import driver, probe
from qlora_wgpu.gpu.driver import guarded_probe, has_crashed, under_way

CRASH = """\
import os
from qlora_wgpu.gpu.driver import guarded_probe
with guarded_probe("a", "trying a"):
    os.abort()
"""


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def crash():
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, check=False)
    assert done.returncode != 0


def test_two_crashes_are_enough():
    crash()
    assert not has_crashed("a")  # which may have had another cause
    crash()
    assert has_crashed("a") and not has_crashed("b")


def test_a_process_that_still_tries_has_not_crashed():
    with guarded_probe("a", ""), guarded_probe("a", ""), guarded_probe("a", ""):
        assert not has_crashed("a")


def test_what_was_come_through_is_forgotten():
    crash()
    with pytest.raises(DeviceError), guarded_probe("a", ""):  # refused, which is no crash
        raise DeviceError("no")
    crash()
    assert not has_crashed("a")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b -1 " + b"9" * 4000])
def test_what_is_kept_may_be_anything(content):
    with guarded_probe("a", ""):
        mark = next(cache_path("attempts").iterdir())
    mark.write_bytes(content)
    assert not has_crashed("a")


def test_without_a_cache_it_is_tried(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with guarded_probe("a", ""):
        assert not has_crashed("a")


def test_listeners_hear_what_is_under_way(monkeypatch):
    heard = []
    monkeypatch.setattr(driver, "listeners", [heard.append])
    with pytest.raises(DeviceError), under_way("trying a"):
        raise DeviceError("no")
    assert heard == ["trying a", ""]


@pytest.mark.parametrize("is_cpu", [False, True])
def test_probes_that_crash_are_left_out(monkeypatch, is_cpu):
    profile, notes = opened(monkeypatch, is_cpu=is_cpu)
    assert (profile.textures if is_cpu else profile.gemm_kind == "matrix") and not notes
    monkeypatch.setattr(probe, "has_crashed", lambda what: "card driver dawn" in what)
    profile, notes = opened(monkeypatch, is_cpu=is_cpu)
    assert not profile.textures and profile.gemm_kind == ("register" if is_cpu else "tiled")
    assert "crashed when" in notes[0]


LISTING = """
import os, sys
from qlora_wgpu.gpu import adapters
from qlora_wgpu.gpu.backend import Backend

class Crashing(Backend):
    name, package = "wgpu", "numpy"
    leaves_out = {leaves_out}
    load = None

    def adapters(self, apis=()):
        if "Vulkan" in (apis or ("Vulkan",)):
            os._exit(3)
        print("listed", *apis)
        return []

Crashing.__abstractmethods__ = frozenset()
adapters._APIS = {{sys.platform: ("Vulkan", "D3D12")}}
adapters.BACKENDS = {{"wgpu": Crashing()}}
print(adapters.list_adapters("wgpu"))
"""


def listed(*, leaves_out, **environment):
    script = LISTING.format(leaves_out=leaves_out)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.slow
def test_an_api_whose_drivers_crash_when_gpus_are_listed_is_left_out():
    """AMD's driver for integrated GPUs does on Windows when asked for cooperative matrices."""
    assert [listed(leaves_out=True).returncode for _ in range(2)] == [3, 3]
    assert listed(leaves_out=True).stdout == "listed D3D12\n[]\n"
    refused = listed(leaves_out=False)  # an implementation that cannot leave it out
    assert "two processes crashed while numpy listed GPUs: update the graphics" in refused.stderr
    wanted = listed(leaves_out=True, WGPU_BACKEND_TYPE="D3D12")
    assert wanted.stdout == "listed D3D12\n[]\n"
