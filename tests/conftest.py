"""One device for the whole session; no GPU is a failure, never a skip."""

import gc
import os

import pytest

# Shaders of tests are compiled with all checks; devices read this when they are opened.
os.environ.setdefault("QLORA_WGPU_CHECKS", "1")
# References are small: a second thread, of each of pytest's processes, only waits for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from support.shaders import keep_compiled_shaders

from qlora_wgpu.gpu.device import Device

keep_compiled_shaders()
# Servers of tests are on this machine: no proxy that its user has is asked for them.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


@pytest.fixture(scope="session")
def device() -> Device:
    return Device()


@pytest.fixture
def settled_device(device) -> Device:
    """The same, without what earlier tests left to Python's collector, which would go any time."""
    gc.collect()
    return device
