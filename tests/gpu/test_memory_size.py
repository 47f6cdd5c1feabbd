"""Memory that is free, as the system tells it."""

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
