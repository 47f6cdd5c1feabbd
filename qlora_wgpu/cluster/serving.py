"""A worker: this process computes for whoever trains through a scheduler.

Dask's own Nanny is not used, since this package supervises its commands already
(``qlora_wgpu/supervision``): a driver that crashes or hangs is explained and the worker begun anew,
while a Nanny gives up for good where its scheduler is away at that moment, and says so in a log
alone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qlora_wgpu.cluster.connection import wait_for_scheduler
from qlora_wgpu.cluster.security import connection_security
from qlora_wgpu.gpu.adapters import choose_adapter

if TYPE_CHECKING:
    from distributed import Security

GPU_VARIABLE, MODEL_VARIABLE = "QLORA_WGPU_WORKER_GPU", "QLORA_WGPU_WORKER_MODEL"
PATIENCE = 600.0  # seconds

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Service:
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


def serve(service: Service, tell: Tell) -> None:
    """Works until it is asked to end; ends the process.

    Its exit code is that of a signal, or ``processes.AGAIN`` where a new process is to go on.
    """
    security = connection_security(
        service.scheduler, service.certificates, allow_plain_tcp=service.allow_plain_tcp
    )
    gpu = choose_adapter(service.gpu).name
    os.environ[GPU_VARIABLE] = service.gpu
    if service.model is not None:
        os.environ[MODEL_VARIABLE] = service.model
    wait_for_scheduler(service.scheduler, security, patience=service.patience, tell=tell)
    asyncio.run(_work(service, security, gpu, tell))


async def _work(service: Service, security: Security, gpu: str, tell: Tell) -> None:
    from qlora_wgpu.cluster.served_worker import work

    code = await work(service, security, gpu, tell)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit would wait for the micro-batch that is being computed
