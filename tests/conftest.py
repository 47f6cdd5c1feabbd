"""One device for the whole session; no GPU is a failure, never a skip."""

import pytest

from qlora_wgpu.gpu.device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    return Device()
