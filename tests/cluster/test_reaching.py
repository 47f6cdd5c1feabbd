"""What a worker and a run are told at the door: a real scheduler, and what is none."""

import socket
import threading
from contextlib import ExitStack, closing

import pytest
from support.processes import PATIENCE
from support.schedulers import free_port, scheduler

from qlora_wgpu.cluster import connection
from qlora_wgpu.cluster.connection import wait_for_scheduler
from qlora_wgpu.cluster.security import connection_security, make_certificates
from qlora_wgpu.errors import ClusterError


def reach(address, folder=None, patience=PATIENCE, report=None):
    security = connection_security(
        address, None if folder is None else str(folder), allow_plain_tcp=False
    )
    wait_for_scheduler(address, security, patience=patience, report=report or (lambda text: None))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [make_certificates(tmp_path_factory.mktemp("c") / "c", 9).folder for _ in range(2)]


@pytest.mark.slow
def test_a_scheduler_with_tls_lets_in_its_own_alone(folders):
    ours, theirs = folders
    told = []
    with free_port() as port, ExitStack() as until_the_end:

        def begin(text):
            told.append(text)
            until_the_end.enter_context(scheduler(ours, port))

        address = f"tls://127.0.0.1:{port}"
        reach(address, ours, report=begin)  # it waits until it has started
        reach(address, ours, report=told.append)
        with pytest.raises(ClusterError, match="has a certificate of another cluster"):
            reach(address, theirs)
        with pytest.raises(ClusterError, match="requires TLS"):
            reach(address.replace("tls", "tcp"))
    assert len(told) == 1
    assert "waiting for a scheduler at tls://" in told[0]


@pytest.mark.slow
def test_a_certificate_that_the_scheduler_refuses(folders, tmp_path, monkeypatch):
    ours, theirs = folders
    mixed = tmp_path / "mixed"  # trusts the scheduler, who does not trust it
    mixed.mkdir()
    for name, source in (("ca.pem", ours), ("cert.pem", theirs), ("key.pem", theirs)):
        (mixed / name).write_bytes((source / name).read_bytes())
    security = connection_security("tls://x:1", str(theirs), allow_plain_tcp=False)
    security.tls_ca_file = str(mixed / "ca.pem")
    with scheduler(ours) as address:
        reach(address, ours)
        monkeypatch.setattr(connection, "_AFTER_HANDSHAKE", PATIENCE)  # the scheduler may be busy
        with pytest.raises(ClusterError, match="refuses this machine's certificate"):
            wait_for_scheduler(address, security, patience=PATIENCE, report=print)


@pytest.mark.slow
def test_a_scheduler_without_tls_is_told(folders):
    with scheduler() as address:
        reach(address)
        with pytest.raises(ClusterError, match="does not use TLS"):
            reach(address.replace("tcp", "tls"), folders[0])


@pytest.mark.slow
def test_nobody_there_is_waited_for_as_long_as_asked():
    told = []
    says = r"no scheduler answered .*refused.* within 1 seconds"
    refused = pytest.raises(ClusterError, match=says)
    with free_port() as port, refused:
        reach(f"tcp://127.0.0.1:{port}", patience=1.0, report=told.append)
    assert len(told) == 1


@pytest.mark.slow
def test_what_takes_a_connection_and_is_silent_is_not_waited_for_ever(monkeypatch):
    monkeypatch.setattr(connection, "_ATTEMPT", 0.5)
    silent = closing(socket.create_server(("127.0.0.1", 0)))
    with silent as listener, pytest.raises(ClusterError, match="does not respond"):
        reach(f"tcp://127.0.0.1:{listener.getsockname()[1]}", patience=0.5)


def test_what_speaks_something_else_is_told():
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        threading.Thread(target=_answer, args=(other,), daemon=True).start()
        with pytest.raises(ClusterError, match="is not a Dask scheduler"):
            reach(f"tcp://127.0.0.1:{other.getsockname()[1]}")


def _answer(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0hello")
