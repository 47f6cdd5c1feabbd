"""Connects to local worker processes, or to a Dask scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from qlora_wgpu.cluster.security import LOOPBACK, Address, connection_security, temporary_security
from qlora_wgpu.config import ClusterConfig
from qlora_wgpu.errors import ClusterError, ConfigError, require_extra

if TYPE_CHECKING:
    from distributed import Security

# ---- Dask's log, and a thread for its loop -------------------------------------------------------

_OTHERS = ("tornado.application", "asyncio")  # loggers that also show Dask's failures


def quieten_dask() -> None:
    """Keeps Dask's tracebacks off the terminal; importing Dask sets its loggers' levels."""
    import_module("distributed")
    own = [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]
    for name in ("distributed", *own, *_OTHERS):
        logging.getLogger(name).setLevel(logging.CRITICAL)


_T = TypeVar("_T")
_PERIOD = 0.1  # seconds between two calls of ``meanwhile``


class LoopThread:
    """Runs coroutines in a thread, while the caller can be interrupted."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(
        self, work: Coroutine[Any, Any, _T], meanwhile: Callable[[], None] = lambda: None
    ) -> _T:
        """Runs a coroutine to its end, or cancels it if the caller is interrupted."""
        future = self.submit(work)
        try:
            while True:
                with contextlib.suppress(NotYet):
                    return future.result(_PERIOD)
                if future.done():  # the coroutine itself raised a TimeoutError
                    return future.result()
                meanwhile()
        finally:
            future.cancel()

    def stop(self, seconds: float) -> None:
        """Cancels all coroutines and ends the thread."""
        with contextlib.suppress(Exception):
            self.submit(_cancelled()).result(seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancelled() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=1.0) if others else None


# ---- waiting for a scheduler ---------------------------------------------------------------------

_ATTEMPT = 5.0  # seconds of an attempt
_PAUSE = 1.0  # seconds between attempts
_AFTER_HANDSHAKE = 0.5  # seconds within which TLS 1.3 reports that it refuses our certificate


class _NotYet(Exception):
    """No scheduler answers yet."""


def wait_for_scheduler(
    scheduler: str,
    security: Security,
    *,
    patience: float,
    report: Callable[[str], None],
) -> None:
    """Returns once a scheduler accepts a connection of this process.

    Dask reports every problem as a time-out. So we first make a connection of our own, up to the
    end of the handshakes, and close it again.
    """
    address = Address.parse(scheduler)
    end = time.monotonic() + patience
    is_reported = False
    while True:
        try:
            _try(address, security)
            return
        except _NotYet as reason:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise ClusterError(
                    f"no scheduler answered at {address} ({reason}) within {patience:,.0f} "
                    "seconds: start it (`dask scheduler`), correct the address, or check the "
                    "firewall"
                ) from None
            if not is_reported:
                report(f"waiting for a scheduler at {address} ({reason})")
                is_reported = True
            time.sleep(min(_PAUSE, remaining))


def _try(address: Address, security: Security) -> None:
    if address.protocol == "tls":
        _try_tls(address, _context(address, security))
    asyncio.run(_greet(address, security))


def _context(address: Address, security: Security) -> ssl.SSLContext:
    try:
        arguments = security.get_connection_args("worker")
    except (OSError, ValueError) as err:  # ssl.SSLError among them
        raise ConfigError(
            f"cannot use the certificates in Dask's configuration for {address}: {err}"
        ) from err
    context: ssl.SSLContext = arguments["ssl_context"]
    return context


def _try_tls(address: Address, context: ssl.SSLContext) -> None:
    with closing(_connected(address)) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.host) as secure:
                secure.settimeout(_AFTER_HANDSHAKE)
                secure.recv(1)  # a server refuses our certificate only after the handshake
        except ssl.SSLCertVerificationError as err:
            raise ClusterError(
                f"the scheduler at {address} has a certificate of another cluster "
                f"({err.verify_message}): use the certificate folder that it was started with"
            ) from err
        except TimeoutError:
            return  # accepted: the scheduler waits for a message
        except ssl.SSLError as err:
            raise _refusal(address, err) from err
        except ConnectionError as err:
            raise _NotYet(f"it closed the connection: {err.strerror}") from err


def _refusal(address: Address, err: ssl.SSLError) -> Exception:
    reason = err.reason or ""
    if "EXPIRED" in reason:
        return ClusterError(
            f"the scheduler at {address} refuses this machine's certificate, which has expired by "
            "the scheduler's clock"
        )
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "DECRYPT_ERROR" in reason:
        return ClusterError(
            f"the scheduler at {address} refuses this machine's certificate: use the certificate "
            "folder that it was started with"
        )
    if isinstance(err, ssl.SSLZeroReturnError | ssl.SSLEOFError):
        return _NotYet("it closed the connection")
    return ClusterError(
        f"the server at {address} does not use TLS ({reason or err}): start the scheduler with "
        "--protocol tls and its certificates, or correct the address"
    )


def _connected(address: Address) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), _ATTEMPT)
    except socket.gaierror as err:
        raise _NotYet(f"unknown host {address.host}: {err.strerror}") from err
    except TimeoutError as err:
        raise _NotYet("no answer") from err
    except OSError as err:
        raise _NotYet((err.strerror or str(err)).lower()) from err


async def _greet(address: Address, security: Security) -> None:
    if address.protocol == "tcp":
        _connected(address).close()  # its error is clearer than Dask's
    try:
        answer = await asyncio.wait_for(_identity(address, security), _ATTEMPT)
    except TimeoutError as err:  # it may be overloaded or suspended
        raise _NotYet("it accepts a connection but does not respond") from err
    except Exception as err:  # Dask may raise anything
        raise _not_dask(address) from err
    if not (isinstance(answer, dict) and answer.get("type") == "Scheduler"):
        raise _not_dask(address)


async def _identity(address: Address, security: Security) -> object:
    from distributed.comm import connect

    # Dask's own time-out, with a worse message, comes after the caller's.
    arguments = security.get_connection_args("worker")
    comm = await connect(str(address), timeout=2 * _ATTEMPT, **arguments)
    try:
        await comm.write({"op": "identity", "reply": True})
        return await comm.read()
    finally:
        comm.abort()


def _not_dask(address: Address) -> ClusterError:
    tls = ", one that requires TLS (tls://)," if address.protocol == "tcp" else ""
    return ClusterError(
        f"the server at {address} is not a Dask scheduler{tls} or has another version of "
        "distributed: correct the address, or install the same version on all machines"
    )


# ---- connections ---------------------------------------------------------------------------------

_REACHED = 30.0  # seconds within which a scheduler must answer
_STARTED = 120.0  # seconds within which worker processes must have started
_CLOSED = 5.0  # seconds for an orderly end
_CONNECTED = 10.0  # seconds within which a worker must answer


@dataclass
class Connection:
    """An open Dask client, and the worker processes that were started for it."""

    client: Any  # asynchronous, on the loop that opened it; connects to workers directly
    address: str  # of the scheduler
    security: Any  # Dask's ``Security``
    cluster: Any = None  # Dask's ``LocalCluster``, with ``local``
    _relayed: asyncio.Future[Any] | None = None

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, if there is one."""
        if find_spec("bokeh") is None:
            return None
        link = getattr(self.client, "dashboard_link", None)
        return str(link) if link else None

    async def connection_error(self, worker: str) -> str | None:
        """Why this process cannot connect to a worker; None if it can."""
        options = self.security.get_connection_args("client")
        connect = import_module("distributed.comm").connect
        try:
            async with asyncio.timeout(_CONNECTED):
                comm = await connect(worker, timeout=_CONNECTED, **options)
        except TimeoutError:
            return "no answer"
        except OSError as err:
            return _reason(err)
        comm.abort()
        return None

    async def relayed_client(self) -> Any:
        """A client whose calls to workers pass through the scheduler; it is opened once."""
        if self._relayed is None:
            opening = _client(self.address, self.security, direct=False)
            self._relayed = asyncio.ensure_future(opening)
        return await asyncio.shield(self._relayed)

    async def close(self) -> None:
        """Closes everything that can be closed in time."""
        relayed = None
        if self._relayed is not None:
            with contextlib.suppress(Exception):
                relayed = await asyncio.wait_for(self._relayed, _CLOSED)
        for each in (relayed, self.client, self.cluster):
            if each is not None:
                await _ended(each)


async def connect(
    settings: ClusterConfig, processes: int, report: Callable[[str], None]
) -> Connection:
    """Opens a connection; must be called on the loop that will use it.

    With ``local``, ``processes`` workers are started. ``report`` gets a sentence if the scheduler
    cannot be reached yet.
    """
    require_extra("cluster")
    assert settings.scheduler is not None
    quieten_dask()
    if settings.scheduler == "local":
        return await _local(processes)
    security = connection_security(
        settings.scheduler, settings.certificates, allow_plain_tcp=settings.allow_plain_tcp
    )
    await asyncio.to_thread(
        wait_for_scheduler, settings.scheduler, security, patience=_REACHED, report=report
    )
    client = await _client(settings.scheduler, security)
    return Connection(client, settings.scheduler, security)


async def _client(address: str, security: Any, *, direct: bool = True) -> Any:
    client = import_module("distributed").Client(
        address, security=security, asynchronous=True, direct_to_workers=direct, timeout=_REACHED,
        set_as_default=direct,
    )  # fmt: skip
    try:
        return await asyncio.wait_for(client, _REACHED)  # Dask's handshake has no time-out
    except (OSError, TimeoutError) as err:
        await _ended(client)
        raise ClusterError(
            f"the scheduler at {address} does not answer: start it with `dask scheduler`, or check "
            f"its address and certificates ({err})"
        ) from err


async def _local(processes: int) -> Connection:
    """Starts a scheduler in this process, and worker processes, for this user alone."""
    security = temporary_security()
    cluster = import_module("distributed").LocalCluster(
        n_workers=processes, threads_per_worker=1, processes=True, host=LOOPBACK,
        protocol="tls://", security=security, asynchronous=True, memory_limit=0,
        dashboard_address=f"{LOOPBACK}:0",  # it has no TLS
        worker_dashboard_address=f"{LOOPBACK}:0",
        silence_logs=logging.CRITICAL,
    )  # fmt: skip
    try:
        await asyncio.wait_for(cluster, _STARTED)
        address = cluster.scheduler_address
        return Connection(await _client(address, security), address, security, cluster)
    except asyncio.CancelledError:  # by Ctrl-C
        await _ended(cluster)
        raise
    except (OSError, RuntimeError) as err:
        await _ended(cluster)
        raise ClusterError(
            "cannot start worker processes: with cluster.scheduler: local, a Python script must "
            'start training below `if __name__ == "__main__":`, since workers import it '
            f"({err})"
        ) from err


async def _ended(each: Any) -> None:
    """Closes a client or a cluster, whatever it raises."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(each.close(), _CLOSED)


def _reason(error: OSError) -> str:
    """The operating system's error, without Dask's wrapping."""
    cause = error.__cause__ or error.__context__ or error
    return " ".join(str(cause).split()) or type(cause).__name__
