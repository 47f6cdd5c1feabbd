"""The Dask worker of ``qlora-wgpu worker``; imported where the extra is known to be there."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import sys
import time
from typing import Any

import psutil
from distributed import Security, Worker, WorkerPlugin

from qlora_wgpu.cluster.connection import quieten_dask
from qlora_wgpu.cluster.security import LOOPBACK, listening_host
from qlora_wgpu.cluster.serving import Service, Tell
from qlora_wgpu.errors import ClusterError, QLoRAError
from qlora_wgpu.supervision.processes import AGAIN

_JOINING = 30.0  # seconds of an attempt to register
_LEAVING = 2.0  # seconds in which a worker says goodbye
_LOOK = 0.5  # seconds between two looks at the memory


async def work(service: Service, security: Security, gpu: str, tell: Tell) -> int:
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
    await _first(asked, worker.lost, too_large)
    if asked.done():
        code = 128 + asked.result()
        tell(f"worker {service.called} leaves; what it was computing goes to others")
    elif too_large.done():
        code = AGAIN
        tell(f"worker {service.called} begins anew: {too_large.result()} (--memory-limit)")
    else:
        tell(f"worker {service.called} has lost its scheduler at {service.scheduler}")
        return AGAIN
    with contextlib.suppress(OSError, TimeoutError):  # the scheduler sees the connection end
        await asyncio.wait_for(worker.close(timeout=_LEAVING, executor_wait=False), 2 * _LEAVING)
    return code


async def _first(*events: asyncio.Future[Any]) -> None:
    """Returns once one of them is done."""
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)


class _ServedWorker(Worker):  # type: ignore[misc]
    """A worker that tells at once that it ends, not once its running task is done."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def close(self, *args: Any, **options: Any) -> Any:
        if not self.lost.done():
            self.lost.set_result(None)
        return await super().close(*args, **options)


class Refusals(WorkerPlugin):  # type: ignore[misc]
    """Shows on the worker's terminal, too, why it refuses what a run asks of it."""

    name = "qlora-wgpu-refusals"

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._worker: Worker | None = None

    def setup(self, worker: Worker) -> None:
        """Remembers the worker."""
        self._worker = worker

    def transition(self, key: str, start: str, finish: str, **options: Any) -> None:
        """Called by Dask when a task changes its state."""
        if finish != "error" or self._worker is None:
            return
        error = pickle.loads(self._worker.state.tasks[key].exception.data)  # written here
        if isinstance(error, QLoRAError):
            self._tell(f"error: {error}")


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


async def _joined(service: Service, security: Security, tell: Tell) -> _ServedWorker:
    """A worker that is registered.

    Its own name may be taken for a while by what it was before its network failed.
    """
    end, told = time.monotonic() + service.patience, False
    while True:
        worker = _ServedWorker(
            service.scheduler,
            nthreads=1,
            name=service.called,
            security=security,
            memory_limit=0,  # Dask would move to disk what a software GPU needs
            host=listening_host(service.scheduler),
            dashboard_address=f"{LOOPBACK}:0",  # it has no TLS
            death_timeout=_JOINING,
            plugins=(Refusals(tell),),
        )
        try:
            await worker
            return worker
        except Exception as err:  # whatever it is, Dask wraps it
            why = str(err.__cause__ or err)
            if "name taken" not in why:
                raise _not_taken(service, why) from err
            if time.monotonic() > end:
                raise _not_taken(service, "another worker is called so (--name)") from err
        if not told:
            tell(
                f"waiting until no other worker at {service.scheduler} is called "
                f"{service.called} (--name)"
            )
            told = True
        await asyncio.sleep(1)


def _not_taken(service: Service, why: str) -> ClusterError:
    return ClusterError(
        f"the scheduler at {service.scheduler} does not take the worker {service.called}: {why}"
    )


async def outgrown(limit: int | None) -> str:
    """Returns, with a reason, once this process takes more memory than it may."""
    process = psutil.Process()
    while limit is None or (taken := process.memory_info().rss) <= limit:
        await asyncio.sleep(_LOOK)
    return f"it took {taken / 2**20:,.0f} MiB of memory and may take {limit / 2**20:,.0f}"
