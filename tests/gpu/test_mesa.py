"""Settings of Mesa's software GPU."""

import pytest

from qlora_wgpu.gpu.mesa import add_few_software_threads, add_software_threads


@pytest.mark.parametrize(("processors", "threads"), [(1, "4"), (2, "8"), (4, "16"), (64, "16")])
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


def test_new_tokens_have_a_thread_for_each_processor(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)), raising=False)
    environ = {}
    add_few_software_threads(environ)
    add_software_threads(environ)  # as the driver is opened
    assert environ == {"LP_NUM_THREADS": "6"}
