"""One device for the whole session; no GPU is a failure, never a skip."""

import os

import pytest

# Shaders of tests are compiled with all checks; devices read this when they are opened.
os.environ.setdefault("QLORA_WGPU_CHECKS", "1")
# References are small: a second thread, of each of pytest's processes, only waits for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from support.shaders import keep_compiled_shaders

from qlora_wgpu.gpu.device import Device

keep_compiled_shaders()


@pytest.fixture(scope="session")
def device() -> Device:
    return Device()
