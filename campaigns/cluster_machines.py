"""The machines of the campaign on clusters: a scheduler, a run's owner, and workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from campaigns.namespaces import Network, network
from qlora_wgpu.cluster.certificates import make_certificates

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
