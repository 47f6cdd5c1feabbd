"""Runs this process as a worker of a scheduler.

Dask's Nanny is not used, since this package already supervises its commands
(``qlora_wgpu/supervision``): if a driver crashes or hangs, the cause is reported and the worker is
restarted. A Nanny gives up if the scheduler is unreachable at that moment, and only logs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from qlora_wgpu.cluster.connection import quieten_dask, wait_for_scheduler
from qlora_wgpu.cluster.security import LOOPBACK, connection_security, listening_host
from qlora_wgpu.errors import ClusterError, QLoRAError
from qlora_wgpu.gpu.adapters import choose_adapter
from qlora_wgpu.supervision.processes import RESTART

if TYPE_CHECKING:
    from distributed import Security, Worker, WorkerPlugin

GPU_VARIABLE, MODEL_VARIABLE = "QLORA_WGPU_WORKER_GPU", "QLORA_WGPU_WORKER_MODEL"
PATIENCE = 600.0  # seconds
_JOINING = 30.0  # seconds of an attempt to register
_LEAVING = 2.0  # seconds for unregistering
_POLL = 0.5  # seconds between two checks of the memory, and of the connection

Report = Callable[[str], None]


@dataclass(frozen=True)
class WorkerOptions:
    """A worker's options."""

    scheduler: str  # address of the scheduler, tls://HOST:PORT
    gpu: str = "auto"  # as ``device.gpu``
    # Workers are sorted by name; None for the machine's name and the GPU
    name: str | None = None
    certificates: str | None = None  # folder with ca.pem, cert.pem and key.pem, or None
    model: str | None = None  # folder or Hub name of the base; None for the run's
    allow_plain_tcp: bool = False  # permits tcp:// to another machine
    # Bytes of host memory beyond which the worker is restarted, or None
    memory_limit: int | None = None
    patience: float = PATIENCE  # seconds to wait for a scheduler

    @property
    def unique_name(self) -> str:
        """The name, or the default one."""
        machine = socket.gethostname()
        return self.name or (machine if self.gpu == "auto" else f"{machine}-{self.gpu}")


def serve(service: WorkerOptions, report: Report) -> None:
    """Runs a worker until it is stopped, then ends the process.

    The exit code is that of a signal, or ``processes.RESTART`` if the worker must be restarted.
    """
    security = connection_security(
        service.scheduler, service.certificates, allow_plain_tcp=service.allow_plain_tcp
    )
    gpu = choose_adapter(service.gpu).name
    os.environ[GPU_VARIABLE] = service.gpu
    if service.model is not None:
        os.environ[MODEL_VARIABLE] = service.model
    wait_for_scheduler(service.scheduler, security, patience=service.patience, report=report)
    asyncio.run(_serve(service, security, gpu, report))


async def _serve(service: WorkerOptions, security: Security, gpu: str, report: Report) -> None:
    code = await _work(service, security, gpu, report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit would wait for the micro-batch that is being computed


async def _work(service: WorkerOptions, security: Security, gpu: str, report: Report) -> int:
    """Connects and computes until the worker is stopped; returns the exit code."""
    quieten_dask()
    stopped = _signals()
    joining = asyncio.ensure_future(_joined(service, security, report))
    await _first(stopped, joining)
    if not joining.done():
        return 128 + stopped.result()
    worker = joining.result()
    report(f"worker {service.unique_name} is connected to {service.scheduler}, with {gpu}")
    too_large = asyncio.ensure_future(memory_exceeded(service.memory_limit))
    await _first(stopped, asyncio.ensure_future(_lost(worker)), too_large)
    if stopped.done():
        code = 128 + stopped.result()
        report(f"worker {service.unique_name} has stopped; its blocks go to other workers")
    elif too_large.done():
        code = RESTART
        report(f"restarting worker {service.unique_name}: {too_large.result()} (--memory-limit)")
    else:
        report(f"worker {service.unique_name} has lost its scheduler at {service.scheduler}")
        return RESTART
    with contextlib.suppress(OSError, TimeoutError):  # the scheduler notices the closed connection
        await asyncio.wait_for(worker.close(timeout=_LEAVING, executor_wait=False), 2 * _LEAVING)
    return code


async def _first(*events: asyncio.Future[Any]) -> None:
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)


def _signals() -> asyncio.Future[int]:
    """A future with the first signal to end this process."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def note(number: int, frame: object = None) -> None:
        if not stopped.done():
            loop.call_soon_threadsafe(stopped.set_result, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, note)  # a closed terminal, except under nohup
    return stopped


async def _joined(service: WorkerOptions, security: Security, report: Report) -> Worker:
    """Registers a worker; after a network failure its old connection may still have its name."""
    from distributed import Worker

    end, is_reported = time.monotonic() + service.patience, False
    while True:
        worker = Worker(
            service.scheduler,
            nthreads=1,
            name=service.unique_name,
            security=security,
            memory_limit=0,  # Dask would spill to disk what a software GPU needs
            host=listening_host(service.scheduler),
            dashboard_address=f"{LOOPBACK}:0",  # it has no TLS
            death_timeout=_JOINING,
            plugins=(_refusals(report),),
        )
        try:
            await worker
            return worker
        except Exception as err:  # Dask wraps all errors
            why, is_late = str(err.__cause__ or err), time.monotonic() > end
            if is_late or "name taken" not in why:
                if "name taken" in why:
                    why = "another worker has this name (--name)"
                raise ClusterError(
                    f"the scheduler at {service.scheduler} does not accept the worker "
                    f"{service.unique_name}: {why}"
                ) from err
        if not is_reported:
            report(
                f"waiting until no other worker at {service.scheduler} has the name "
                f"{service.unique_name} (--name)"
            )
            is_reported = True
        await asyncio.sleep(1)


def _refusals(report: Report) -> WorkerPlugin:
    """Shows errors of a run on the worker's terminal as well."""
    from distributed import WorkerPlugin

    class Refusals(WorkerPlugin):  # type: ignore[misc]
        name = "qlora-wgpu-refusals"

        def setup(self, worker: Worker) -> None:
            self._tasks = worker.state.tasks

        def transition(self, key: str, start: str, finish: str, **options: Any) -> None:
            if finish == "error":
                error = pickle.loads(self._tasks[key].exception.data)  # pickled by this process
                if isinstance(error, QLoRAError):
                    report(f"error: {error}")

    return Refusals()


async def _lost(worker: Worker) -> None:
    """Waits until a worker ends, which it does at once if its scheduler is lost."""
    while worker.status.name not in ("closing", "closed", "failed"):
        await asyncio.sleep(_POLL)


async def memory_exceeded(limit: int | None) -> str:
    """Waits until this process exceeds its memory limit; returns the reason."""
    process = psutil.Process()
    while limit is None or (taken := process.memory_info().rss) <= limit:
        await asyncio.sleep(_POLL)
    return f"it used {taken / 2**20:,.0f} MiB of memory, the limit is {limit / 2**20:,.0f}"
