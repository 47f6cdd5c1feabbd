"""The way to a cluster's workers: processes that are started here, or a scheduler somewhere."""

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
from qlora_wgpu.errors import ClusterError, ConfigError
from qlora_wgpu.extras import require_extra

if TYPE_CHECKING:
    from distributed import Security

# ---- Dask's log, and a thread for its loop -------------------------------------------------------

_OTHERS = ("tornado.application", "asyncio")  # through which Dask's failures come as well


def quieten_dask() -> None:
    """Keeps Dask's tracebacks off the terminal.

    Importing Dask sets the levels of its loggers, so that it must be there before.
    """
    import_module("distributed")
    own = [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]
    for name in ("distributed", *own, *_OTHERS):
        logging.getLogger(name).setLevel(logging.CRITICAL)


_T = TypeVar("_T")
_PERIOD = 0.1  # seconds between two looks at what else there is


class LoopThread:
    """Runs coroutines while the caller waits, looks after other things, or is interrupted."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begins a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(
        self, work: Coroutine[Any, Any, _T], meanwhile: Callable[[], None] = lambda: None
    ) -> _T:
        """Runs a coroutine to its end; one that is interrupted is cancelled."""
        future = self.submit(work)
        try:
            while True:
                with contextlib.suppress(NotYet):
                    return future.result(_PERIOD)
                if future.done():  # its own error was a TimeoutError, too
                    return future.result()
                meanwhile()
        finally:
            future.cancel()

    def stop(self, seconds: float) -> None:
        """Ends the thread, whatever still runs in it."""
        with contextlib.suppress(Exception):
            self.submit(_cancelled()).result(seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancelled() -> None:
    """Ends all that runs on this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=1.0) if others else None


# ---- a connection that is tried ------------------------------------------------------------------

_ATTEMPT = 5.0  # seconds of one, beyond which a machine counts as silent
_PAUSE = 1.0  # seconds between two
_AFTERTHOUGHT = 0.5  # seconds within which TLS 1.3 tells that it refuses our certificate


class _NotYet(Exception):
    """Nobody answers there, so far."""


def wait_for_scheduler(
    scheduler: str,
    security: Security,
    *,
    patience: float,
    tell: Callable[[str], None],
) -> None:
    """Returns once a scheduler lets this process in.

    Dask tells of all that may be wrong as one time-out. So a connection is tried beforehand, to the
    end of the handshakes, and given up again.
    """
    address = Address.parse(scheduler)
    end = time.monotonic() + patience
    told = False
    while True:
        try:
            _try(address, security)
            return
        except _NotYet as reason:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise ClusterError(
                    f"no scheduler answers at {address} ({reason}) after {patience:,.0f} seconds: "
                    "start it (`dask scheduler`), or correct the address; a firewall may be in "
                    "between"
                ) from None
            if not told:
                tell(f"waiting for a scheduler at {address} ({reason})")
                told = True
            time.sleep(min(_PAUSE, remaining))


def _try(address: Address, security: Security) -> None:
    """Connects once and leaves again."""
    if address.protocol == "tls":
        _try_tls(address, _context(address, security))
    asyncio.run(_greet(address, security))


def _context(address: Address, security: Security) -> ssl.SSLContext:
    try:
        arguments = security.get_connection_args("worker")
    except (OSError, ValueError) as err:  # ssl.SSLError among them
        raise ConfigError(
            f"the certificates that Dask's configuration names for {address} cannot be used: {err}"
        ) from err
    context: ssl.SSLContext = arguments["ssl_context"]
    return context


def _try_tls(address: Address, context: ssl.SSLContext) -> None:
    with closing(_connected(address)) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.host) as secure:
                secure.settimeout(_AFTERTHOUGHT)
                secure.recv(1)  # a server that refuses our certificate says so after its handshake
        except ssl.SSLCertVerificationError as err:
            raise ClusterError(
                f"the scheduler at {address} shows a certificate of another cluster "
                f"({err.verify_message}): use the folder of certificates that it was started with"
            ) from err
        except TimeoutError:
            return  # let in: a scheduler waits for us to speak, or speaks
        except ssl.SSLError as err:
            raise _refusal(address, err) from err
        except ConnectionError as err:
            raise _NotYet(f"it closed the connection, {err.strerror}") from err


def _refusal(address: Address, err: ssl.SSLError) -> Exception:
    reason = err.reason or ""
    if "EXPIRED" in reason:
        return ClusterError(
            f"the scheduler at {address} refuses this machine's certificate, which has expired by "
            "its clock"
        )
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "DECRYPT_ERROR" in reason:
        return ClusterError(
            f"the scheduler at {address} refuses this machine's certificate: use the folder of "
            "certificates that it was started with"
        )
    if isinstance(err, ssl.SSLZeroReturnError | ssl.SSLEOFError):
        return _NotYet("it closed the connection")
    return ClusterError(
        f"what answers at {address} does not speak TLS ({reason or err}): start the scheduler with "
        "--protocol tls and its certificates, or correct the address"
    )


def _connected(address: Address) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), _ATTEMPT)
    except socket.gaierror as err:
        raise _NotYet(f"the name {address.host} is not known, {err.strerror}") from err
    except TimeoutError as err:
        raise _NotYet("no answer") from err
    except OSError as err:
        raise _NotYet((err.strerror or str(err)).lower()) from err


async def _greet(address: Address, security: Security) -> None:
    """Exchanges Dask's own greetings, as every connection begins."""
    if address.protocol == "tcp":
        _connected(address).close()  # its reason is a plainer one than Dask's
    try:
        answer = await asyncio.wait_for(_identity(address, security), _ATTEMPT)
    except TimeoutError as err:  # it may be too busy, or stopped
        raise _NotYet("it takes a connection, but says nothing") from err
    except Exception as err:  # whatever Dask makes of what others say
        raise _not_dask(address) from err
    if not (isinstance(answer, dict) and answer.get("type") == "Scheduler"):
        raise _not_dask(address)


async def _identity(address: Address, security: Security) -> object:
    from distributed.comm import connect

    # Dask's own end, of which it says less, comes after that of who waits for this.
    arguments = security.get_connection_args("worker")
    comm = await connect(str(address), timeout=2 * _ATTEMPT, **arguments)
    try:
        await comm.write({"op": "identity", "reply": True})
        return await comm.read()
    finally:
        comm.abort()


def _not_dask(address: Address) -> ClusterError:
    wants = ", or one that wants TLS (tls://)" if address.protocol == "tcp" else ""
    return ClusterError(
        f"what answers at {address} is not a Dask scheduler{wants}, or one of another version of "
        "distributed: correct the address, or install the same version on all machines"
    )


# ---- connections ---------------------------------------------------------------------------------

_REACHED = 30.0  # seconds in which a scheduler has to answer
_STARTED = 120.0  # seconds in which worker processes have to be there
_CLOSED = 5.0  # seconds for an orderly end
_MET = 10.0  # seconds in which a worker has to answer


@dataclass
class Connection:
    """An open Dask client, and the processes that were started for it."""

    client: Any  # asynchronous, on the loop that it was opened on; it connects to workers itself
    address: str  # of the scheduler
    security: Any  # how to connect
    cluster: Any = None  # of the processes started here; None with a scheduler of somebody's own
    _passing: asyncio.Future[Any] | None = None

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, where there is one."""
        if find_spec("bokeh") is None:
            return None
        link = getattr(self.client, "dashboard_link", None)
        return str(link) if link else None

    async def unreached(self, worker: str) -> str | None:
        """Why this process cannot connect to a worker; None where it can."""
        options = self.security.get_connection_args("client")
        connect = import_module("distributed.comm").connect
        try:
            async with asyncio.timeout(_MET):
                comm = await connect(worker, timeout=_MET, **options)
        except TimeoutError:
            return "no answer"
        except OSError as err:
            return _reason(err)
        comm.abort()
        return None

    async def passing(self) -> Any:
        """A client whose calls to workers the scheduler passes on; it is opened once."""
        if self._passing is None:
            opening = _client(self.address, self.security, direct=False)
            self._passing = asyncio.ensure_future(opening)
        return await asyncio.shield(self._passing)

    async def close(self) -> None:
        """Ends it; what does not end in time is left behind."""
        passing = None
        if self._passing is not None:
            with contextlib.suppress(Exception):
                passing = await asyncio.wait_for(self._passing, _CLOSED)
        for each in (passing, self.client, self.cluster):
            if each is not None:
                await _ended(each)


async def connect(
    settings: ClusterConfig, processes: int, tell: Callable[[str], None]
) -> Connection:
    """Opens a connection; to be called on the loop that will use it.

    Args:
        settings: Where the workers are.
        processes: How many to start with ``local``.
        tell: Told that it waits for a scheduler.
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
        wait_for_scheduler, settings.scheduler, security, patience=_REACHED, tell=tell
    )
    client = await _client(settings.scheduler, security)
    return Connection(client, settings.scheduler, security)


async def _client(address: str, security: Any, *, direct: bool = True) -> Any:
    client = import_module("distributed").Client(
        address, security=security, asynchronous=True, direct_to_workers=direct, timeout=_REACHED,
        set_as_default=direct,
    )  # fmt: skip
    try:
        return await asyncio.wait_for(client, _REACHED)  # a greeting has no limit of Dask's
    except (OSError, TimeoutError) as err:
        await _ended(client)
        raise ClusterError(
            f"the scheduler at {address} does not answer: start it with `dask scheduler`, or see "
            f"whether address and certificates are right ({err})"
        ) from err


async def _local(processes: int) -> Connection:
    """A scheduler in this process, and workers in others, for this user alone."""
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
            "worker processes cannot be started: a Python script that trains with "
            'cluster.scheduler: local has to do so below `if __name__ == "__main__":`, since '
            f"they read it, too ({err})"
        ) from err


async def _ended(each: Any) -> None:
    """Closes a client or a cluster, as far as it lets itself be closed."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(each.close(), _CLOSED)


def _reason(error: OSError) -> str:
    """What Dask was told by the system, without what it makes of it."""
    cause = error.__cause__ or error.__context__ or error
    return " ".join(str(cause).split()) or type(cause).__name__
