"""Reaching a scheduler: waiting until it is there, and saying why it lets nobody in.

Dask tells all of this as one time-out; so a connection is tried beforehand, to the end of the
handshakes, and given up again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from qlora_wgpu.cluster.addresses import Address
from qlora_wgpu.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from distributed import Security

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

    Args:
        scheduler: Its address.
        security: How to connect.
        patience: Seconds to wait for one that does not answer.
        tell: Gets a sentence when it begins to wait.

    Raises:
        ClusterError: If it refuses this process, is no scheduler, or does not answer in time.
        ConfigError: If the certificates of Dask's configuration cannot be read.
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
