"""The calls of a GPU's measurement: what is measured where a backend does not open the GPU."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The scripts, as a run in their folder finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import gpu
    import gpu_driver
    import gpu_prepare

    yield SimpleNamespace(gpu=gpu, prepare=gpu_prepare, driver=gpu_driver)
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("opened", ["dawn", "wgpu"])
def test_what_opens_the_gpu_is_measured(scripts, tmp_path, opened, call):
    session = SimpleNamespace(folder=tmp_path)
    calls = scripts.gpu.Calls(scripts.gpu.Sizes(), session, ["dawn", "wgpu"], "python")
    assert [part.name for part in calls.devices()] == ["device-dawn", "device-wgpu"]
    before = {part.needs for part in calls.parts(call)}
    assert "device-dawn" in before
    calls.measure_with([opened])
    parts = calls.parts(call)
    assert {part.needs for part in parts} <= {"", f"device-{opened}", "torch"}
    assert len({part.name for part in parts}) == len(parts)
    assert sum(part.name.startswith(("bench-", "layers-")) for part in parts) > 1


def test_no_part_asks_for_more_time_than_it_is_given_or_a_call_has(scripts, tmp_path):
    session = SimpleNamespace(folder=tmp_path)
    calls = scripts.gpu.Calls(scripts.gpu.Sizes(), session, ["dawn", "wgpu"], "python")
    for part in (part for call in (1, 2, 3) for part in calls.parts(call)):
        assert part.least < part.seconds < 4.75 * 60, part.name


PYTHON = "exit 0\n"
NONE = "exit 1\n"
DRIVER = "echo /usr/local/nvidia/nvidia_icd.json\n"


@pytest.mark.parametrize(
    ("find", "expected"), [(NONE, ""), (DRIVER, "/usr/local/nvidia/nvidia_icd.json")]
)
def test_the_setup_goes_on_without_a_driver_of_nvidias(scripts, tmp_path, find, expected):
    """A shell that stops at the first failure, and one that goes on only if it succeeded."""
    tools = {"python3": PYTHON, "ldconfig": "echo libvulkan.so.1\n", "find": find, "ls": NONE}
    for name, code in tools.items():
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{code}")
        tool.chmod(0o755)
    (tmp_path / "setup.sh").write_text(scripts.prepare.SETUP.format(folder=tmp_path))
    shell = f'set -e; . {tmp_path}/setup.sh && echo "went on with $VK_DRIVER_FILES"'
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", shell], env=path, capture_output=True, text=True)
    assert done.stdout.strip() == f"went on with {expected}".strip(), done.stderr
