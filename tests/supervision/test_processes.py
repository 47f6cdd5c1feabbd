"""What this process may have of the machine's memory."""

import sys

import pytest

from qlora_wgpu.supervision import processes
from qlora_wgpu.supervision.processes import address_space, container_limit

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Control groups: their files with what they hold, and the lines of a process's own."""
    monkeypatch.setattr(processes, "_GROUPS", tmp_path / "own")
    monkeypatch.setattr(processes, "_ROOT", tmp_path / "root")

    def write(own, **files):
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def test_the_least_limit_of_a_group_and_of_those_around_it_counts(groups):
    files = {
        "memory.max": f"{900 * MIB}\n",
        "a/memory.max": f"{500 * MIB}\n",
        "a/b/memory.max": "max\n",
    }
    groups("0::/a/b\n", **files)
    assert container_limit() == 500 * MIB
    groups("0::/elsewhere\n")  # as seen from outside of a container
    assert container_limit() == 900 * MIB


def test_groups_of_the_first_version(groups):
    limit = "memory/a/memory.limit_in_bytes"
    own = "9:name=systemd:/\n4:memory:/a\n3:cpuset:/\n0::/\n"
    groups(
        own, **{limit: f"{300 * MIB}\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}
    )
    assert container_limit() == 300 * MIB
    groups(own, **{limit: "9223372036854771712\n"})
    assert container_limit() is None


@pytest.mark.parametrize("own", ["", "no group\n", "0::/a\n"])
def test_no_limit_is_told_where_there_is_none(groups, own):
    groups(own)
    assert container_limit() is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_address_space_in_words(monkeypatch):
    monkeypatch.setattr(processes, "memory_limit", lambda: 2048 * MIB)
    assert address_space() == "no more than 2,048 MiB of address space (ulimit -v)"
    monkeypatch.setattr(processes, "memory_limit", lambda: None)
    assert address_space() is None
