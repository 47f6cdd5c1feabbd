"""The memory limits of this process."""

import os
import signal
import sys
import threading

import pytest

from qlora_wgpu.supervision import processes
from qlora_wgpu.supervision.processes import (
    address_space,
    block_signals,
    is_pending,
    is_running,
    memory_limit,
    own_number,
    signal_name,
    unblock_signals,
)

MIB = 1 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_address_space_in_words(monkeypatch):
    monkeypatch.setattr(processes, "memory_limit", lambda: 2048 * MIB)
    assert address_space() == "address space limited to 2,048 MiB (ulimit -v)"
    monkeypatch.setattr(processes, "memory_limit", lambda: None)
    assert address_space() is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(("limit", "told"), [((5, 9), 5), ((-1, 9), None)])
def test_the_limit_that_counts_is_the_soft_one(monkeypatch, limit, told):
    import resource

    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit)
    assert memory_limit() == told


@pytest.mark.parametrize(
    ("code", "name"), [(0, None), (1, None), (-1, "SIGHUP"), (-9, "SIGKILL"), (-999, "signal 999")]
)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_the_signal_that_ended_a_process(code, name):
    assert signal_name(code) == name


def test_processes_are_known_by_their_numbers():
    assert own_number() == os.getpid() and is_running(own_number()) is True
    assert is_running(1 << 80) is False


@pytest.mark.skipif(sys.platform == "win32", reason="signals wait on POSIX alone")
def test_signals_wait_until_they_may_come():
    before, came = signal.signal(signal.SIGINT, lambda *what: came.append(what[0])), []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with block_signals():
            assert not is_pending(signal.SIGINT)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            assert is_pending(signal.SIGINT) and not is_pending(signal.SIGTERM) and not came
        assert came == [signal.SIGINT]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        with block_signals():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            unblock_signals()
            assert came == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)
