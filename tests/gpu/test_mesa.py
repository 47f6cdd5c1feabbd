"""Settings of Mesa's software GPU."""

import pytest

from qlora_wgpu.gpu.adapters import (
    add_software_threads,
    rows_of_products,
    wants_short_loops,
    wants_textures,
)


@pytest.mark.parametrize(("processors", "threads"), [(1, "2"), (2, "4"), (8, "16"), (64, "16")])
def test_there_are_more_threads_than_processors(monkeypatch, processors, threads):
    monkeypatch.setattr(
        "os.sched_getaffinity", lambda process: set(range(processors)), raising=False
    )
    environ = {}
    add_software_threads(environ)
    assert environ == {"LP_NUM_THREADS": threads}


def test_what_the_user_has_set_stays():
    environ = {"LP_NUM_THREADS": "1"}
    add_software_threads(environ)
    assert environ == {"LP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("vendor", "family", "lanes", "rows"),
    [
        ("AuthenticAMD", 26, 16, 16),
        ("AuthenticAMD", 26, 8, 32),
        ("AuthenticAMD", 25, 16, 32),
        ("AuthenticAMD", 25, 8, 10),
        ("AuthenticAMD", 23, 8, 10),
        ("AuthenticAMD", 25, 4, 32),
        ("GenuineIntel", 26, 16, 32),
        ("GenuineIntel", 6, 8, 32),
    ],
)
def test_products_hold_fewer_rows_where_instructions_are_waited_for(
    monkeypatch, vendor, family, lanes, rows
):
    told = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n\n" * 2
    monkeypatch.setattr("qlora_wgpu.gpu.adapters.file_bytes", lambda *_: told.encode())
    assert rows_of_products(lanes) == rows


@pytest.mark.parametrize(
    ("vendor", "family", "lanes", "wanted"),
    [
        ("AuthenticAMD", 25, 8, True),
        ("AuthenticAMD", 23, 8, True),
        ("AuthenticAMD", 25, 16, False),
        ("AuthenticAMD", 25, 4, False),
        ("AuthenticAMD", 26, 8, False),
        ("AuthenticAMD", "unknown", 8, False),
        ("GenuineIntel", 6, 8, False),
    ],
)
def test_all_lies_in_textures_where_words_of_buffers_are_waited_for(
    monkeypatch, vendor, family, lanes, wanted
):
    told = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n\n" * 2
    monkeypatch.setattr("qlora_wgpu.gpu.adapters.file_bytes", lambda *_: told.encode())
    assert wants_textures(lanes) == wants_short_loops(lanes) == wanted


def test_products_of_an_unknown_processor_hold_as_many_rows_as_most(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr("qlora_wgpu.gpu.adapters.file_bytes", missing)
    assert rows_of_products(16) == 32
    assert not wants_textures(8)
