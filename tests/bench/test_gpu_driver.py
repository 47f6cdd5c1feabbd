"""A card's driver that Vulkan does not find by itself: hidden, without its file, or crashing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# In place of Vulkan: a card where VK_DRIVER_FILES names a file whose library is there.
VULKAN = """#!{python}
import json, os, sys
name = os.environ.get("VK_DRIVER_FILES")
if name is None:
    print(json.dumps([[4, "llvmpipe"]]))
elif "icd_crash" in name:
    os.abort()
else:
    library = json.load(open(name))["ICD"]["library_path"]
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    known = [library, *(os.path.join(f, library) for f in folders)]
    print("the loader says this", file=sys.stderr)
    print(json.dumps([[2, "H100"]] if any(map(os.path.isfile, known)) else []))
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    import gpu_driver

    python = tmp_path / "python"
    python.write_text(VULKAN.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(gpu_driver.sys, "executable", str(python))
    yield gpu_driver
    del sys.modules["gpu_driver"]


def make(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def icd(path, library):
    return make(path, json.dumps({"ICD": {"library_path": library}}))


def test_a_driver_beside_a_software_gpus_is_found_with_its_library(driver, tmp_path):
    root = tmp_path / "nvidia"
    file = icd(root / "share/vulkan/icd.d/nvidia_icd.json", "libGLX_nvidia.so.0")
    library = make(root / "lib64/libGLX_nvidia.so.0")
    vendor = make(root / "share/glvnd/egl_vendor.d/10_nvidia.json")
    tried = driver.find_driver([root], tmp_path)
    assert tried[-1].cards == ("H100",)
    assert tried[-1].environment == {
        "VK_DRIVER_FILES": str(file), "LD_LIBRARY_PATH": str(library.parent),
        "__EGL_VENDOR_LIBRARY_FILENAMES": str(vendor),
    }  # fmt: skip
    assert str(tried[0]) == "as it is: no card (software: llvmpipe)"


def test_a_driver_without_its_file_is_given_one(driver, tmp_path):
    library = make(tmp_path / "nvidia/lib64/libEGL_nvidia.so.0")
    tried = driver.find_driver([tmp_path / "nvidia"], tmp_path)
    assert tried[-1].cards == ("H100",)
    written = json.loads(Path(tried[-1].environment["VK_DRIVER_FILES"]).read_text())
    assert written["ICD"]["library_path"] == str(library)


def test_drivers_that_crash_or_list_nothing_are_told_and_left(driver, tmp_path):
    root = tmp_path / "nvidia"
    icd(root / "a/nvidia_icd_crash.json", "libGLX_nvidia.so.0")
    icd(root / "b/nvidia_icd.json", "libNothing.so")
    tried = [str(each) for each in driver.find_driver([root], tmp_path)]
    assert len(tried) == 3 and "icd_crash.json: no card (code -6" in tried[1]
    assert "b/nvidia_icd.json: no card (the loader says this)" in tried[2]


def test_the_card_that_vulkan_lists_is_taken_as_it_is(driver, tmp_path, monkeypatch):
    file = icd(tmp_path / "own.json", str(make(tmp_path / "lib")))
    make(tmp_path / "libEGL_nvidia.so.0")
    monkeypatch.setenv("VK_DRIVER_FILES", str(file))
    (tried,) = driver.find_driver([tmp_path], tmp_path)
    assert tried.cards == ("H100",) and not tried.environment


def test_vulkan_itself_is_asked():
    """Of this machine's software GPU, and without any driver."""
    command = [sys.executable, str(BENCHMARKS / "gpu_driver.py"), "--list"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (4, "llvmpipe") in {(kind, name.split(" ")[0]) for kind, name in listed}
    none = subprocess.run(
        command, capture_output=True, env={"VK_DRIVER_FILES": "/none", "VK_ICD_FILENAMES": "/none"}
    )
    assert none.returncode == 1 and b"Vulkan's error -9" in none.stderr
