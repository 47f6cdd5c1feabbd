"""`qlora-wgpu worker` against a real scheduler: joining, crashing, refusing, leaving."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import Client
from support.commands import run_here
from support.processes import PATIENCE, until
from support.schedulers import free_port, scheduler

from qlora_wgpu.cluster.security import Address, connection_security, make_certificates
from qlora_wgpu.cluster.serving import memory_exceeded
from qlora_wgpu.errors import ConfigError

_WORKER = [sys.executable, "-m", "qlora_wgpu", "worker"]
_PATIENCE = f"{PATIENCE:g}"


class Started:
    """A worker's supervising process, and what it has said."""

    def __init__(self, log, *arguments):
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*_WORKER, *arguments], stdout=file, stderr=file, cwd=log.parent
            )

    @property
    def text(self):
        return self._log.read_text()

    def child(self):
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def wait_for(self, what, times=1):
        def told():
            assert self.process.poll() is None, self.text
            return self.text.count(what) >= times

        until(told)

    def code(self):
        return self.process.wait(PATIENCE)


@contextmanager
def worker(tmp_path, *arguments):
    started = Started(tmp_path / "worker.log", *map(str, arguments))
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("c") / "c", 9).folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker's child in /proc")
def test_a_worker_joins_refuses_begins_anew_and_leaves(tmp_path, folder):
    computing = tmp_path / "computing"
    task = f"import pathlib, time; pathlib.Path({str(computing)!r}).touch(); time.sleep(1000)"
    options = ("--certificates", folder, "--name", "w", "--gpu", "0", "--patience", _PATIENCE)
    with (
        free_port() as port,
        worker(tmp_path, f"tls://127.0.0.1:{port}", *options) as started,
    ):
        started.wait_for("waiting for a scheduler at")
        with scheduler(folder, port) as address:
            started.wait_for(f"worker w is connected to {address}, with ")
            security = connection_security(address, str(folder), allow_plain_tcp=False)
            with Client(address, security=security, timeout=PATIENCE) as client:
                (info,) = client.scheduler_info()["workers"].values()
                assert (info["name"], info["host"], info["nthreads"]) == ("w", "127.0.0.1", 1)
                asked = client.submit(os.getenv, "QLORA_WGPU_WORKER_GPU", pure=False)
                assert asked.result(PATIENCE) == "0"
                with pytest.raises(ConfigError):
                    client.submit(Address.parse, "elsewhere", pure=False).result(PATIENCE)
                started.wait_for("error: a scheduler's address must be")
                os.kill(started.child(), signal.SIGKILL)
                started.wait_for("is connected", times=2)
                assert "note: the process was killed (SIGKILL); restarting" in started.text
                client.submit(exec, task, pure=False)
                until(computing.exists)
                started.process.send_signal(signal.SIGTERM)  # long before that has an end
                assert started.code() == 128 + signal.SIGTERM
        assert "worker w has stopped; its blocks go to other workers" in started.text
        assert "Traceback" not in started.text


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="others have no SIGHUP")
def test_a_worker_leaves_when_its_terminal_is_closed(tmp_path):
    with scheduler() as address, worker(tmp_path, address, "--name", "w") as started:
        started.wait_for("is connected")
        started.process.send_signal(signal.SIGHUP)
        assert started.code() == 128 + signal.SIGHUP
    assert "worker w has stopped; its blocks go to other workers" in started.text


@pytest.mark.slow
def test_a_worker_without_its_scheduler_waits_and_ends(tmp_path):
    options = ("--name", "w", "--patience", _PATIENCE)
    with (
        free_port() as port,
        worker(tmp_path, address := f"tcp://127.0.0.1:{port}", *options) as started,
    ):
        with scheduler(port=port):
            started.wait_for("is connected")
        started.wait_for(f"worker w has lost its scheduler at {address}")
        started.wait_for(f"waiting for a scheduler at {address}")
        started.process.send_signal(signal.SIGTERM)
        assert started.code() == 128 + signal.SIGTERM
    assert "Traceback" not in started.text


def test_more_memory_than_a_worker_may_take_is_noticed():
    sentence = asyncio.run(memory_exceeded(1 << 20))
    assert re.fullmatch(r"it used [0-9,]+ MiB of memory, the limit is 1", sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpu1:8786"], "tls://HOST:PORT"),
        (["tcp://gpu1:8786"], "--allow-plain-tcp"),
        (["tls://gpu1:8786"], "requires certificates"),
        (["tcp://127.0.0.1:1", "--gpu", "no such GPU"], "no GPU matches"),
        (["tcp://127.0.0.1:1", "--memory-limit", "much"], "--memory-limit must be a size"),
        (["tcp://127.0.0.1:1", "--patience", "0"], "no scheduler answered"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, arguments, sentence):
    done = run_here("worker", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
