"""What Linux's control groups leave this process of memory."""

import pytest

from qlora_wgpu.gpu import memory
from qlora_wgpu.supervision import processes
from qlora_wgpu.supervision.processes import container_limit, container_room

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


def test_files_of_a_container_give_way(groups):
    stat = "anon 300\nactive_file 150\ninactive_file 50\nfile 999\n"
    files = {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": stat}
    groups("0::/\n", **files)
    assert container_room() == memory.available_bytes() == 1000 - 600 + 200
    groups("0::/\n", **{"memory.current": "2000\n"})
    assert container_room() == memory.available_bytes() == 0


def test_the_group_with_the_least_room_counts(groups):
    """Of nested ones, and of the first version, whose figures are of those within, too."""
    outer = {"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 900\n"}
    inner = {"a/memory.max": "800\n", "a/memory.current": "100\n", "a/memory.stat": "anon 9\n"}
    groups("0::/a\n", **outer, **inner)
    assert container_room() == 100
    stat = "active_file 7\ntotal_active_file 30\ntotal_inactive_file 20\n"
    first = {"limit_in_bytes": "500\n", "usage_in_bytes": "480\n", "stat": stat}
    groups("4:memory:/b\n", **{f"memory/b/memory.{name}": text for name, text in first.items()})
    assert container_room() == memory.available_bytes() == 70
    assert memory.machine_bytes() == 500


def test_without_a_limit_the_machine_tells(groups):
    files = {"memory.max": "max\n", "memory.current": "600\n", "memory.stat": "anon 300\n"}
    groups("0::/\n", **files)
    assert container_room() is None
    assert memory.available_bytes() == pytest.approx(memory._unused(), rel=0.2)
    whole = memory.machine_bytes()
    assert whole is None or whole > memory._unused()
