"""Memory that is free, as the system tells it."""

import subprocess
import sys

import pytest

from qlora_wgpu.gpu import memory


@pytest.fixture
def group(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", str(tmp_path))

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"memory.{name}").write_text(text)

    return write


def test_files_of_a_container_give_way(group):
    kinds = "anon 300\nactive_file 150\ninactive_file 50\nfile 999\n"
    group(max="1000\n", current="600\n", stat=kinds)
    assert memory.available_bytes() == 1000 - 600 + 200
    group(current="2000\n")
    assert memory.available_bytes() == 0


def test_without_a_limit_the_machine_tells(group):
    group(max="max\n", current="600\n", stat="anon 300\n")
    assert memory.available_bytes() == pytest.approx(memory._unused(), rel=0.2)


def test_all_of_a_machine_is_what_its_container_may_have(group):
    group(max="max\n")
    whole = memory.machine_bytes()
    assert whole is None or whole > memory._unused()
    group(max="5000\n")
    assert memory.machine_bytes() == 5000


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
