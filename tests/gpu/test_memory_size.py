"""Memory that is free, as the system tells it."""

import mmap
import os
import sys

import pytest

from qlora_wgpu.gpu import memory_size


@pytest.fixture
def group(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_size, "_CGROUP", str(tmp_path))

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"memory.{name}").write_text(text)

    return write


def test_files_of_a_container_give_way(group):
    kinds = "anon 300\nactive_file 150\ninactive_file 50\nfile 999\n"
    group(max="1000\n", current="600\n", stat=kinds)
    assert memory_size.available_bytes() == 1000 - 600 + 200
    group(current="2000\n")
    assert memory_size.available_bytes() == 0


def test_without_a_limit_the_machine_tells(group):
    group(max="max\n", current="600\n", stat="anon 300\n")
    assert memory_size.available_bytes() == pytest.approx(memory_size._unused(), rel=0.2)


def test_all_of_a_machine_is_what_its_container_may_have(group):
    group(max="max\n")
    whole = memory_size.machine_bytes()
    assert whole is None or whole > memory_size._unused()
    group(max="5000\n")
    assert memory_size.machine_bytes() == 5000


@pytest.mark.skipif(sys.platform != "linux", reason="such files are Linux's")
def test_a_process_has_taken_what_no_disk_has(tmp_path):
    """Files without a name, in which newer Mesa has a device's memory, count; others do not."""
    size = 64 << 20
    before = memory_size.process_bytes()
    nameless = os.memfd_create("memory")
    os.truncate(nameless, size)
    with mmap.mmap(nameless, size) as memory:
        memory.write(bytes(size))
        taken = memory_size.process_bytes()
    os.close(nameless)
    assert 0.9 * size < taken - before < 1.5 * size

    (tmp_path / "file").write_bytes(bytes(size))
    before = memory_size.process_bytes()
    with (
        (tmp_path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as memory,
    ):
        assert sum(memory[:: mmap.PAGESIZE]) == 0
        assert memory_size.process_bytes() - before < 0.5 * size
