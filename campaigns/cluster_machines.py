"""Machines of a small network, each a network namespace of Linux; making them takes root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from qlora_wgpu.cluster.security import make_certificates


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_be_made() -> bool:
    """Whether this process may make namespaces."""
    return shutil.which("ip") is not None and os.geteuid() == 0


class Network:
    """Machines that are joined by one switch, a namespace of its own.

    Attributes:
        addresses: By a machine's name.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        self._prefix = f"qlora{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._machines = list(machines)
        self.addresses = {name: f"10.99.0.{n + 1}" for n, name in enumerate(machines)}

    def make(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        for name in self._machines:
            space = self.namespace(name)
            ip("netns", "add", space)
            ip("-n", self._switch, "link", "add", name, "type", "veth",
               "peer", "name", "eth0", "netns", space)  # fmt: skip
            ip("-n", self._switch, "link", "set", name, "master", "switch", "up")
            ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for space in (*map(self.namespace, self._machines), self._switch):
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

    def namespace(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"

    def cable(self, machine: str, *, plugged: bool) -> None:
        """Pulls a machine's cable, or plugs it in again."""
        ip("-n", self._switch, "link", "set", machine, "up" if plugged else "down")

    def isolate(self, machine: str, *, isolated: bool) -> None:
        """Puts a machine behind a wall, or takes it away: walled ones do not see each other."""
        state = "on" if isolated else "off"
        ip("-n", self._switch, "link", "set", machine, "type", "bridge_slave", "isolated", state)

    def shape(self, machine: str, gigabits: float) -> None:
        """Limits what a machine sends and gets."""
        queue = ["root", "tbf", "rate", f"{gigabits}gbit", "burst", "512kb", "latency", "100ms"]
        for space, device in ((self.namespace(machine), "eth0"), (self._switch, machine)):
            subprocess.run(
                ["tc", "-n", space, "qdisc", "replace", "dev", device, *queue],
                check=True, capture_output=True,
            )  # fmt: skip

    def start(self, machine: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on a machine; it is the process that ends with the returned one."""
        space = self.namespace(machine)
        return subprocess.Popen(["ip", "netns", "exec", space, *command], **options)


@contextmanager
def network(machines: Sequence[str]) -> Iterator[Network]:
    """Machines that are gone afterwards."""
    made = Network(machines)
    try:
        made.make()
        yield made
    finally:
        made.remove()


ROOT = Path(__file__).parents[1]
WORKERS = ("one", "two", "three")
PORT = 8786


@dataclass
class Machines:
    """The processes of a cluster.

    Attributes:
        net: Between them.
        folder: Of all files.
        address: The scheduler's.
        running: Workers' processes, the supervising ones, by name.
        objective: What runs learn.
    """

    net: Network
    folder: Path
    address: str = ""
    objective: str = "sft"
    running: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)
    _logs: dict[str, IO[bytes]] = field(default_factory=dict)

    def start_scheduler(self) -> None:
        host = self.net.addresses["scheduler"]
        self.address = f"tls://{host}:{PORT}"
        ours = self.folder / "certificates"
        command = [
            sys.executable, "-c", "from distributed.cli.dask_scheduler import main; main()",
            "--host", f"tls://{host}:{PORT}", "--protocol", "tls", "--no-dashboard",
            "--tls-ca-file", str(ours / "ca.pem"), "--tls-cert", str(ours / "cert.pem"),
            "--tls-key", str(ours / "key.pem"),
        ]  # fmt: skip
        self.running["scheduler"] = self._start("scheduler", "scheduler", command)

    def start_worker(self, name: str, *options: str, **environ: str) -> None:
        certificates = () if "--certificates" in options else self._certificates()
        command = ["worker", self.address, *certificates, "--patience", "60", *options]
        self.running[name] = self.qlora(name, name, *command, "--name", name, **environ)

    def train(self, out: str, *overrides: str) -> subprocess.Popen[Any]:
        folder = str(self.folder / "certificates")
        return self.qlora(
            "owner", out, "train", *self.settings(out, *overrides),
            f"cluster.scheduler={self.address}", f"cluster.certificates={folder}",
        )  # fmt: skip

    def settings(self, out: str, *overrides: str) -> list[str]:
        return [
            str(ROOT / "demo" / "demo.yaml"), f"output.dir={self.folder / out}",
            "train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=6",
            "log.logging_steps=1", "eval.eval_steps=50", "output.save_steps=20",
            *self._data(), *overrides,
        ]  # fmt: skip

    def _data(self) -> list[str]:
        """Answers of the demo's data, each beside the next row's as the worse one."""
        if self.objective == "sft":
            return []
        settings = [f"train.objective={self.objective}"]
        for name in ("train", "eval"):
            lines = (ROOT / "demo" / "data" / f"{name}.jsonl").read_text().splitlines()
            rows = [json.loads(line)["messages"] for line in lines]
            pairs = [
                {"prompt": row[:-1], "chosen": row[-1:], "rejected": other[-1:]}
                for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
            ]
            path = self.folder / f"{name}.jsonl"
            path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
            settings.append(f"data.{name}={path}")
        return settings

    def qlora(
        self, machine: str, log: str, *arguments: str, **environ: str
    ) -> subprocess.Popen[Any]:
        return self._start(machine, log, [sys.executable, "-m", "qlora_wgpu", *arguments], environ)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_for(self, name: str, text: str, seconds: float = 60.0) -> bool:
        """Whether a text appears in a log in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if text in self.log(name):
                return True
            time.sleep(0.05)
        return False

    def end(self, name: str) -> int:
        """Asks a worker to end, and gives its exit code."""
        process = self.running.pop(name)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return ended(process, 15.0)

    def end_all(self) -> None:
        for name in list(self.running):
            self.end(name)
        for log in self._logs.values():
            log.close()

    def computing(self, name: str) -> int | None:
        """The process of a worker that computes: the child of the supervising one."""
        return child_of(self.running[name].pid)

    def _certificates(self) -> tuple[str, str]:
        return "--certificates", str(self.folder / "certificates")

    def _start(
        self, machine: str, name: str, command: list[str], environ: dict[str, str] | None = None
    ) -> subprocess.Popen[Any]:
        log = self._logs.setdefault(name, (self.folder / f"{name}.log").open("ab"))
        own = {**os.environ, "PYTHONPATH": str(ROOT), "LP_NUM_THREADS": "1", **(environ or {})}
        return self.net.start(
            machine, command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=own,
            cwd=self.folder,
        )  # fmt: skip


def child_of(pid: int) -> int | None:
    """A process that a supervising one has."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def ended(process: subprocess.Popen[Any], seconds: float) -> int:
    """The exit code, -9 where it had to be killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def machines(objective: str) -> Iterator[Machines]:
    """A scheduler, an owner's machine, and workers' that are connected."""
    names = ("scheduler", "owner", *WORKERS)
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder, network(names) as net:
        made = Machines(net, Path(folder), objective=objective)
        make_certificates(made.folder / "certificates", 2)
        make_certificates(made.folder / "foreign", 2)
        made.start_scheduler()
        try:
            yield made
        finally:
            made.end_all()
