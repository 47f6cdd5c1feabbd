"""Memory that is free, as the system tells it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from qlora_wgpu.gpu import memory

MAPPED = """
import mmap, os, sys
from qlora_wgpu.gpu.memory import process_bytes

size = 64 << 20
nameless = os.memfd_create("memory")
os.truncate(nameless, size)
with open(sys.argv[1], "rb") as file:
    for number, access in (nameless, mmap.ACCESS_WRITE), (file.fileno(), mmap.ACCESS_READ):
        before, sum = process_bytes(), 0
        with mmap.mmap(number, size, access=access) as memory:
            for page in range(0, size, mmap.PAGESIZE):
                if number == nameless:
                    memory[page] = 1
                sum += memory[page]
            print((process_bytes() - before) / size, sum * mmap.PAGESIZE / size)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="such files are Linux's")
def test_a_process_has_taken_what_no_disk_has(tmp_path):
    """Files without a name, in which newer Mesa has a device's memory, count; others do not."""
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, tmp_path / "file"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (nameless, written), (named, read) = (map(float, x.split()) for x in done.stdout.splitlines())
    assert 0.9 < nameless < 1.1 and written == 1
    assert named < 0.1 and read == 0


# ---- a device's memory ---------------------------------------------------------------------------


def device_of(kind="IntegratedGPU", *, is_cpu=False):
    gpu = SimpleNamespace(info={"adapter_type": kind})
    return SimpleNamespace(is_cpu=is_cpu, name="gpu", gpu=gpu)


@pytest.fixture
def known(monkeypatch):
    """What the driver says of a GPU's heap, and the system of the machine."""

    def of(heap, host=None, unused=None, container=None, left=None):
        monkeypatch.setattr(memory, "_own_heap", lambda name: heap)
        monkeypatch.setattr(memory, "_own_memory", lambda name: heap and heap.nbytes)
        monkeypatch.setattr(memory, "_host_memory", lambda: host)
        monkeypatch.setattr(memory, "_unused", lambda: unused)
        monkeypatch.setattr(memory, "container_limit", lambda: container)
        monkeypatch.setattr(memory, "container_room", lambda: left)

    return of


@pytest.mark.parametrize(
    ("opened", "heap", "host", "expected"),
    [
        (device_of("DiscreteGPU"), (8 << 30, 4 << 30), 1, int(0.95 * (4 << 30)) - (256 << 20)),
        (device_of("DiscreteGPU"), (8 << 30, 100 << 20), 1, 1),  # less than the reserve
        (device_of("DiscreteGPU"), None, 1 << 30, None),
        (device_of(), (8 << 30, 4 << 30), 1, 6 << 30),  # shared with the processor
        (device_of(), None, 4 << 30, 3 << 30),
        (device_of(), None, None, None),
        (device_of(is_cpu=True), (8, 4), 1 << 30, None),
    ],
)
def test_what_training_may_take(known, opened, heap, host, expected):
    known(heap and memory._Heap(*heap), host)
    assert memory.room(opened) == expected


@pytest.mark.parametrize(
    ("opened", "heap", "expected"),
    [
        (device_of("DiscreteGPU"), (8, 4), 8),
        (device_of("DiscreteGPU"), None, None),
        (device_of(), None, 30),
        (device_of(), (8, 4), 8),
        (device_of(is_cpu=True), None, 20),
    ],
)
def test_the_memory_of_a_device(known, opened, heap, expected):
    known(heap and memory._Heap(*heap), host=30, unused=20)
    assert memory.memory_size(opened) == expected


@pytest.mark.parametrize(
    ("sizes", "free", "whole"),
    [((40, 30, 20, 10), 10, 20), ((20, 10, 40, 30), 10, 20), ((20, 10, None, None), 10, 20),
     ((None, None, 40, 30), 30, 40), ((None, None, None, None), None, None)],
)  # fmt: skip
def test_a_container_s_limit_is_the_machine_s(known, sizes, free, whole):
    host, unused, container, left = sizes
    known(None, host, unused, container, left)
    assert (memory.available_bytes(), memory.machine_bytes()) == (free, whole)
