"""Calls into the driver: their errors as sentences, and how long they take."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import DeviceError, DeviceLostError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.driver import driver_call, overdue_call
from qlora_wgpu.gpu.timing import Readback


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "Error\n\nCaused by:\n    Parent device is lost",
            DeviceLostError,
            "lost",
        ),
        ("Not enough memory left.", OutOfMemoryError, "ran out of memory"),
        ("Validation Error\n\nCaused by:\n  In f\n    bad size", DeviceError, "In f bad size"),
        ("", DeviceError, "RuntimeError"),
    ],
)
def test_errors_become_sentences(text, kind, words):
    with pytest.raises(DeviceError) as raised, driver_call("a GPU", "adding"):
        raise RuntimeError(text)
    assert type(raised.value) is kind
    assert words in str(raised.value) and "while adding" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_a_call_that_has_not_returned_is_overdue():
    assert overdue_call() is None
    with driver_call("a GPU", "sleeping", timeout=0.0):
        with driver_call("a GPU", "waking"):
            assert overdue_call() is None
        assert "while sleeping" in overdue_call()
    assert overdue_call() is None


@pytest.mark.own_device
def test_a_lost_device_says_so_whatever_is_asked_of_it():
    device = Device()
    buffer = device.buffer(16, "weights")
    device.raw.destroy()
    with pytest.raises(DeviceLostError):
        device.buffer(16, "weights")
    with pytest.raises(DeviceError):
        Readback(device, buffer, 16).request()
    with pytest.raises(DeviceError):
        device.write(buffer, np.zeros(4, np.float32))
    with pytest.raises(DeviceError):
        device.read(buffer, 16)


@pytest.mark.parametrize("counts", [False, True])
def test_copies_on_their_way_come_in_order_and_their_room_may_count(counts):
    device = Device()
    before = device.memory.total
    buffer = device.buffer(16, "weights")
    copies = Readback(device, buffer, 16, 2, counts=counts)
    assert device.memory.total - before == 16 + 2 * 16 * counts
    for value in (1, 2):
        assert len(copies) == value - 1 and not copies.full
        device.write(buffer, np.full(4, value, np.uint32))
        copies.request()
    assert copies.full
    got = [np.frombuffer(copies.take(), np.uint32).tolist() for _ in range(2)]
    assert got == [[1] * 4, [2] * 4] and len(copies) == 0


@pytest.mark.parametrize(
    ("api", "kind", "seconds", "waits"),
    [("Metal", "IntegratedGPU", 120.0, 2), ("Vulkan", "IntegratedGPU", 1800.0, 0),
     ("Vulkan", "CPU", float("inf"), 0)],
)  # fmt: skip
def test_little_is_under_way_on_metal_where_a_wait_may_never_end(
    monkeypatch, api, kind, seconds, waits
):
    own, read, waited = Device(), Device.read, []
    own.budget = own.memory.total  # of which waiting takes nothing
    monkeypatch.setattr(Device, "read", lambda *args: waited.append(args) or read(*args))
    info = {**own.gpu.info, "adapter_type": kind, "backend_type": api}
    monkeypatch.setattr(own, "gpu", SimpleNamespace(info=info))
    waited.clear()
    total = own.memory.total
    for _ in range(250):
        own.submit()
    assert (own._usual_timeout(), len(waited), own.memory.total) == (seconds, waits, total)


@pytest.mark.parametrize(
    ("features", "own", "size"),
    [((), 16, 0), (("subgroup-size-control",), 16, 16), (("subgroup-size-control",), 0, 8)],
)
def test_a_subgroup_size_is_requested_where_it_can_be(features, own, size):
    device = Device.__new__(Device)
    device.features, device._broadcasting = frozenset(features), 8
    assert device._pinned_size(SimpleNamespace(subgroup_size=own)) == size
