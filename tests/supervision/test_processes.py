"""The memory limits of this process."""

import sys

import pytest

from qlora_wgpu.supervision import processes
from qlora_wgpu.supervision.processes import address_space

MIB = 1 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_address_space_in_words(monkeypatch):
    monkeypatch.setattr(processes, "memory_limit", lambda: 2048 * MIB)
    assert address_space() == "address space limited to 2,048 MiB (ulimit -v)"
    monkeypatch.setattr(processes, "memory_limit", lambda: None)
    assert address_space() is None
