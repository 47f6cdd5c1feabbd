"""A device that records what is laid out and filled, and computes nothing."""

import numpy as np
import pytest

from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE
from qlora_wgpu.gpu.recording_device import RecordingDevice


@pytest.fixture
def opened():
    filled = []

    def fill(buffer, begin, data):
        filled.append((buffer, begin, data.tobytes()))

    return RecordingDevice(CPU_PROFILE, 1024, fill), filled


def test_buffers_are_counted_and_filled_as_a_device_s(opened):
    device, filled = opened
    first = device.buffer(10, "base", "a weight")
    second = device.buffer(1024, "inputs")
    assert (first.number, first.kind, first.label, first.nbytes) == (0, "base", "a weight", 16)
    assert device.buffers == [first, second] and second.nbytes == 1024
    assert device.memory.by_kind["base"] == 16 and device.memory.total == 1040
    device.write(first, np.arange(2, dtype=np.float32), 4)
    device.fill(second, np.ones(1, np.uint8))
    device.write(second, b"ab", 8)
    numbers = np.arange(2, dtype=np.float32).tobytes()
    assert filled == [(first, 4, numbers), (second, 0, b"\1"), (second, 8, b"ab")]


def test_it_reads_before_it_writes(opened):
    device, seen = opened[0], []
    device.write(device.buffer(16, "base"), np.zeros(4, np.uint8), 0, lambda raw: seen.append(raw))
    assert [raw.nbytes for raw in seen] == [4]


def test_what_no_binding_holds_is_refused(opened):
    device, _ = opened
    assert device.max_binding == device.max_buffer == 1024
    with pytest.raises(OutOfMemoryError):
        device.buffer(1028, "base", "too large")
    assert not device.buffers and device.memory.total == 0


def test_nothing_is_computed_or_read(opened):
    device, _ = opened
    assert not device.computes and not device.is_cpu and device.name == "a browser"
    with pytest.raises(DeviceError, match="cannot be read"):
        device.read(device.buffer(16, "base"), 4)
    with pytest.raises(DeviceError, match="cannot be run here"):
        device.submit()
    with device.driver_call("anything"):
        assert device.pipeline("shader") == "shader"
    windows = {"x": (None, 0, 16)}
    assert device.bind_group("shader", windows) is windows
