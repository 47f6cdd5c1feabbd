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


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All kernels of a GPU's defaults, for heads of 64 and of 128 elements: 1B and 8B."""
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    process = run_script("--layers", 2, "--products", "default", "--json", file)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, json.loads(file.read_text())


def test_nothing_spills_and_attention_leaves_room(done):
    rows = done[1]["kernels"]
    assert not {row["kernel"]: row["spilled"] for row in rows if row["spilled"] or row["scratch"]}
    attention = {r["kernel"]: r["registers"] for r in rows if r["kernel"].startswith("attention/")}
    assert len(attention) >= 6
    assert max(attention.values()) <= 128, attention


def test_every_kernel_has_figures_and_a_line(done):
    text, report = done
    assert "Mesa" in report["mesa"] and "NAVI21" in report["device"]
    for row in report["kernels"]:
        assert row["kernel"] in text and not row["failure"]
        assert 0 < row["registers"] <= 256 and row["waves"] > 0 and row["latency"] > 0, row
    kernels = {row["kernel"].partition("(")[0]: row for row in report["kernels"]}
    forward, norm = kernels["glu/forward.wgsl"], kernels["rms_norm/forward.wgsl"]
    assert (forward["barriers"], forward["lds"]) == (0, 0) < (norm["barriers"], norm["lds"])
    # Once a layer in a training step, and once for the next token of a text.
    assert list(forward["launches"].values()) == [4, 4]
    assert "adamw/clip.wgsl" in kernels
    for plan in report["plans"].values():
        assert plan["kernels"] > 20 and plan["failed"] == 0


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
