"""Memory that is free, as the system tells it."""

import subprocess
import sys

import pytest

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
