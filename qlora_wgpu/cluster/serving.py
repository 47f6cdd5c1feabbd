"""A worker: this process computes for whoever trains through a scheduler.

Dask's own Nanny is not used, since this package supervises its commands already
(``qlora_wgpu/supervision``): a driver that crashes or hangs is explained and the worker begun anew,
while a Nanny gives up for good where its scheduler is away at that moment, and says so in a log
alone.
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
_LEAVING = 2.0  # seconds in which a worker says goodbye
_LOOK = 0.5  # seconds between two looks at the memory, and at the scheduler

Tell = Callable[[str], None]


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is to be."""

    scheduler: str  # address of the scheduler, tls://HOST:PORT
    gpu: str = "auto"  # as the setting ``device.gpu``
    # Its name in messages, and in the order in which micro-batches are divided; None for the
    # machine's name and the GPU
    name: str | None = None
    certificates: str | None = None  # folder with ca.pem, cert.pem and key.pem, or None
    model: str | None = None  # folder or hub name of the base on this machine; None for the run's
    allow_plain_tcp: bool = False  # whether tcp:// may lead to another machine
    # Bytes of this machine's memory beyond which the worker begins anew, or None
    memory_limit: int | None = None
    patience: float = PATIENCE  # seconds to wait for a scheduler

    @property
    def called(self) -> str:
        """The worker's name."""
        machine = socket.gethostname()
        return self.name or (machine if self.gpu == "auto" else f"{machine}-{self.gpu}")


def serve(service: WorkerOptions, tell: Tell) -> None:
    """Works until it is asked to end; ends the process.

    Its exit code is that of a signal, or ``processes.RESTART`` where a new process is to go on.
    """
    security = connection_security(
        service.scheduler, service.certificates, allow_plain_tcp=service.allow_plain_tcp
    )
    gpu = choose_adapter(service.gpu).name
    os.environ[GPU_VARIABLE] = service.gpu
    if service.model is not None:
        os.environ[MODEL_VARIABLE] = service.model
    wait_for_scheduler(service.scheduler, security, patience=service.patience, tell=tell)
    asyncio.run(_serve(service, security, gpu, tell))


async def _serve(service: WorkerOptions, security: Security, gpu: str, tell: Tell) -> None:
    code = await _work(service, security, gpu, tell)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit would wait for the micro-batch that is being computed


async def _work(service: WorkerOptions, security: Security, gpu: str, tell: Tell) -> int:
    """Connects, and stays until somebody ends it."""
    quieten_dask()
    asked = _signals()
    joining = asyncio.ensure_future(_joined(service, security, tell))
    await _first(asked, joining)
    if not joining.done():
        return 128 + asked.result()
    worker = joining.result()
    tell(f"worker {service.called} is connected to {service.scheduler}, with {gpu}")
    too_large = asyncio.ensure_future(outgrown(service.memory_limit))
    await _first(asked, asyncio.ensure_future(_lost(worker)), too_large)
    if asked.done():
        code = 128 + asked.result()
        tell(f"worker {service.called} leaves; what it was computing goes to others")
    elif too_large.done():
        code = RESTART
        tell(f"worker {service.called} begins anew: {too_large.result()} (--memory-limit)")
    else:
        tell(f"worker {service.called} has lost its scheduler at {service.scheduler}")
        return RESTART
    with contextlib.suppress(OSError, TimeoutError):  # the scheduler sees the connection end
        await asyncio.wait_for(worker.close(timeout=_LEAVING, executor_wait=False), 2 * _LEAVING)
    return code


async def _first(*events: asyncio.Future[Any]) -> None:
    """Returns once one of them is done."""
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)


def _signals() -> asyncio.Future[int]:
    """Is done once somebody asks this process to end."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[int] = loop.create_future()

    def note(number: int, frame: object = None) -> None:
        if not asked.done():
            loop.call_soon_threadsafe(asked.set_result, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, note)  # a terminal that is closed, but under nohup
    return asked


async def _joined(service: WorkerOptions, security: Security, tell: Tell) -> Worker:
    """A worker that is registered.

    Its own name may be taken for a while by what it was before its network failed.
    """
    from distributed import Worker

    end, told = time.monotonic() + service.patience, False
    while True:
        worker = Worker(
            service.scheduler,
            nthreads=1,
            name=service.called,
            security=security,
            memory_limit=0,  # Dask would move to disk what a software GPU needs
            host=listening_host(service.scheduler),
            dashboard_address=f"{LOOPBACK}:0",  # it has no TLS
            death_timeout=_JOINING,
            plugins=(_refusals(tell),),
        )
        try:
            await worker
            return worker
        except Exception as err:  # whatever it is, Dask wraps it
            why, is_late = str(err.__cause__ or err), time.monotonic() > end
            if is_late or "name taken" not in why:
                if "name taken" in why:
                    why = "another worker is called so (--name)"
                raise ClusterError(
                    f"the scheduler at {service.scheduler} does not take the worker "
                    f"{service.called}: {why}"
                ) from err
        if not told:
            tell(
                f"waiting until no other worker at {service.scheduler} is called "
                f"{service.called} (--name)"
            )
            told = True
        await asyncio.sleep(1)


def _refusals(tell: Tell) -> WorkerPlugin:
    """Shows on the worker's terminal, too, why it refuses what a run asks of it."""
    from distributed import WorkerPlugin

    class Refusals(WorkerPlugin):  # type: ignore[misc]
        name = "qlora-wgpu-refusals"

        def setup(self, worker: Worker) -> None:
            self._tasks = worker.state.tasks

        def transition(self, key: str, start: str, finish: str, **options: Any) -> None:
            if finish == "error":
                error = pickle.loads(self._tasks[key].exception.data)  # written here
                if isinstance(error, QLoRAError):
                    tell(f"error: {error}")

    return Refusals()


async def _lost(worker: Worker) -> None:
    """Returns once a worker ends, as it does without its scheduler.

    That is at once, not when the task that it runs is done.
    """
    while worker.status.name not in ("closing", "closed", "failed"):
        await asyncio.sleep(_LOOK)


async def outgrown(limit: int | None) -> str:
    """Returns, with a reason, once this process takes more memory than it may."""
    process = psutil.Process()
    while limit is None or (taken := process.memory_info().rss) <= limit:
        await asyncio.sleep(_LOOK)
    return f"it took {taken / 2**20:,.0f} MiB of memory and may take {limit / 2**20:,.0f}"
