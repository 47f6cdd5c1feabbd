"""Who may connect to whom: what Dask is told about TLS.

Whoever can connect to a scheduler or a worker can run code there. So across machines both sides
show a certificate that the cluster's authority signed, and plain TCP is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qlora_wgpu.cluster.addresses import Address
from qlora_wgpu.cluster.credentials import Credentials
from qlora_wgpu.cluster.extra import require_extra
from qlora_wgpu.errors import ConfigError

if TYPE_CHECKING:
    from distributed import Security

LOOPBACK = "127.0.0.1"


def connection_security(
    scheduler: str, certificates: str | None, *, allow_plain_tcp: bool
) -> Security:
    """How this process connects to a scheduler, and lets others connect to itself.

    Args:
        scheduler: Its address, tls://HOST:PORT or tcp://HOST:PORT.
        certificates: Folder with ca.pem, cert.pem and key.pem; None for what Dask's own
            configuration says (distributed.comm.tls).
        allow_plain_tcp: Whether tcp:// may lead to another machine.

    Raises:
        ConfigError: If the address is none, plain TCP is not allowed, or a certificate is missing
            or wrong.
    """
    require_extra()
    address = Address.parse(scheduler)
    if address.protocol == "tcp":
        return _plain(address, certificates, allowed=allow_plain_tcp)
    return _mutual(address, certificates)


def temporary_security() -> Security:
    """TLS with a certificate that exists in memory alone, for processes that this one starts.

    Without it every user of this machine could run code in them.
    """
    require_extra()
    from distributed import Security

    return Security.temporary()


def listening_host(scheduler: str) -> str | None:
    """The address on which a worker of this scheduler listens; None is for Dask to choose.

    Dask would listen on all of a machine's addresses, for a scheduler on this machine as well.

    Raises:
        ConfigError: If the scheduler's address is none.
    """
    address = Address.parse(scheduler)
    if not address.is_loopback:
        return None
    return "::1" if ":" in address.host else LOOPBACK


def _plain(address: Address, certificates: str | None, *, allowed: bool) -> Security:
    from distributed import Security

    if certificates is not None:
        raise ConfigError(
            f"{address} uses no certificates, but the folder {certificates} is named: write "
            f"tls://{str(address).removeprefix('tcp://')}, or name no folder"
        )
    if not (address.is_loopback or allowed):
        raise ConfigError(
            f"{address} is plain TCP to another machine, where anyone on the network could run "
            "code on all machines: use tls:// with certificates (`qlora-wgpu certificates "
            "FOLDER`), or say that the network is safe with cluster.allow_plain_tcp=true, or "
            "--allow-plain-tcp for a worker"
        )
    return Security(require_encryption=False)


def _mutual(address: Address, certificates: str | None) -> Security:
    from distributed import Security

    if certificates is None:
        configured = Security(require_encryption=True)
        if not (configured.tls_ca_file and configured.tls_client_cert):
            raise ConfigError(
                f"{address} needs certificates: name their folder with cluster.certificates, or "
                "with --certificates for a worker (`qlora-wgpu certificates FOLDER` makes one)"
            )
        return configured
    files = Credentials.read(certificates)
    roles = ("client", "scheduler", "worker")
    return Security(
        require_encryption=True,
        tls_ca_file=files.authority,
        **{f"tls_{role}_cert": files.certificate for role in roles},
        **{f"tls_{role}_key": files.key for role in roles},
    )
