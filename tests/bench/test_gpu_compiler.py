"""RADV's figures of kernels, as `python benchmarks/gpu_compiler.py` tells them.

No card is needed, but Mesa's driver of AMD's cards is: where it is missing, that is a failure.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Mesa's compilers are Linux's")


def run_script(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_compiler.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def driver(monkeypatch):
    """The module beside the script."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import radv.driver

    return radv.driver


def test_kernels_of_a_plan_are_compiled(tmp_path):
    file = tmp_path / "figures.json"
    done = run_script(
        "--layers", 2, "--model", "llama-3.2-1b", "--only", "glu/", "rms_norm/", "--json", file
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert "Mesa" in report["mesa"] and "NAVI21" in report["device"]
    kernels = {row["kernel"].partition("(")[0]: row for row in report["kernels"]}
    assert {"glu/forward.wgsl", "rms_norm/forward.wgsl"} <= kernels.keys()
    for name, row in kernels.items():
        assert name in done.stdout
        assert not row["failure"] and row["spilled"] == row["scratch"] == 0, name
        assert 0 < row["registers"] <= 256 and row["waves"] > 0 and row["latency"] > 0, name
    forward, norm = kernels["glu/forward.wgsl"], kernels["rms_norm/forward.wgsl"]
    assert (forward["barriers"], forward["lds"]) == (0, 0) < (norm["barriers"], norm["lds"])
    assert set(forward["launches"].values()) == {2}
    plans = report["plans"].values()
    assert len(plans) >= 2 and all(p["kernels"] == len(report["kernels"]) for p in plans)


def test_a_kernel_that_kills_the_compiler_is_told(driver, tmp_path):
    module = tmp_path / "broken.spv"
    module.write_bytes(b"\x03\x02\x23\x07" + bytes(16))
    (outcome,) = driver.Radv("navi21").compile([module])
    assert outcome.figures is None
    assert "died of signal" in outcome.failure and "Mesa" in outcome.driver


def test_a_missing_driver_is_a_sentence(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_FOLDERS", (str(tmp_path),))
    with pytest.raises(driver.DeviceError, match="apt-get install mesa-vulkan-drivers"):
        driver.Radv("navi21")


def test_kernels_that_are_not_there_are_a_sentence():
    done = run_script("--layers", 1, "--only", "nonsense/")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no kernel of these plans begins with nonsense/" in done.stderr
