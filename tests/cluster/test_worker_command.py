"""`qlora-wgpu worker` against a real scheduler: joining, crashing, refusing, leaving."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import Client
from support.commands import run_here
from support.schedulers import free_port, scheduler

from qlora_wgpu.cluster.addresses import Address
from qlora_wgpu.cluster.certificates import make_certificates
from qlora_wgpu.cluster.security import connection_security
from qlora_wgpu.cluster.served_worker import outgrown
from qlora_wgpu.errors import ConfigError

_WORKER = [sys.executable, "-m", "qlora_wgpu", "worker"]
_SECONDS = 60.0


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
        end = time.monotonic() + _SECONDS
        while self.text.count(what) < times:
            assert time.monotonic() < end, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)

    def code(self):
        return self.process.wait(_SECONDS)


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


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker's child in /proc")
def test_a_worker_joins_refuses_begins_anew_and_leaves(tmp_path, folder):
    port = free_port()
    options = (f"tls://127.0.0.1:{port}", "--certificates", folder, "--name", "w", "--gpu", "0")
    with worker(tmp_path, *options, "--patience", "60") as started:
        started.wait_for("waiting for a scheduler at")
        with scheduler(folder, port) as address:
            started.wait_for(f"worker w is connected to {address}, with ")
            security = connection_security(address, str(folder), allow_plain_tcp=False)
            with Client(address, security=security, timeout=_SECONDS) as client:
                (info,) = client.scheduler_info()["workers"].values()
                assert (info["name"], info["host"], info["nthreads"]) == ("w", "127.0.0.1", 1)
                asked = client.submit(os.getenv, "QLORA_WGPU_WORKER_GPU", pure=False)
                assert asked.result(_SECONDS) == "0"
                with pytest.raises(ConfigError):
                    client.submit(Address.parse, "elsewhere", pure=False).result(_SECONDS)
                started.wait_for("error: a scheduler's address is")
                os.kill(started.child(), signal.SIGKILL)
                started.wait_for("is connected", times=2)
                assert "note: the process was killed from outside; beginning anew" in started.text
                client.submit(time.sleep, 60, pure=False)
                time.sleep(0.5)
                began = time.monotonic()
                started.process.send_signal(signal.SIGTERM)
                assert started.code() == 128 + signal.SIGTERM
                assert time.monotonic() - began < 10.0
        assert "worker w leaves; what it was computing goes to others" in started.text
        assert "Traceback" not in started.text


def test_a_worker_without_its_scheduler_waits_and_ends(tmp_path):
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with worker(tmp_path, address, "--name", "w", "--patience", "20") as started:
        with scheduler(port=port):
            started.wait_for("is connected")
        started.wait_for(f"worker w has lost its scheduler at {address}")
        started.wait_for(f"waiting for a scheduler at {address}")
        started.process.send_signal(signal.SIGTERM)
        assert started.code() == 128 + signal.SIGTERM
    assert "Traceback" not in started.text


def test_more_memory_than_a_worker_may_take_is_noticed():
    sentence = asyncio.run(outgrown(1 << 20))
    assert re.fullmatch(r"it took [0-9,]+ MiB of memory and may take 1", sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpu1:8786"], "tls://HOST:PORT"),
        (["tcp://gpu1:8786"], "--allow-plain-tcp"),
        (["tls://gpu1:8786"], "needs certificates"),
        (["tcp://127.0.0.1:1", "--gpu", "no such GPU"], "no GPU is called"),
        (["tcp://127.0.0.1:1", "--memory-limit", "much"], "--memory-limit must be a size"),
        (["tcp://127.0.0.1:1", "--patience", "0"], "no scheduler answers"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, arguments, sentence):
    done = run_here("worker", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
