"""Settings of Mesa's software GPU."""

import pytest

from qlora_wgpu.gpu.mesa import add_software_threads


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
