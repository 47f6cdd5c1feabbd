"""TLS between the machines of a cluster: addresses, certificates and Dask's settings.

Anyone who can connect to a scheduler or a worker can run code there. So across machines both sides
need a certificate that the cluster's authority signed, and plain TCP is refused.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_wgpu.checkpoint.atomic import atomic_file
from qlora_wgpu.errors import ConfigError, require_extra
from qlora_wgpu.files import file_bytes

if TYPE_CHECKING:
    from cryptography import x509
    from distributed import Security

# ---- addresses -----------------------------------------------------------------------------------

_ADDRESS = re.compile(
    r"(?P<protocol>tls|tcp)://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@]+):(?P<port>[0-9]{1,5})/?"
)


@dataclass(frozen=True)
class Address:
    """The address of a scheduler."""

    protocol: str  # ``"tls"`` or ``"tcp"``
    host: str  # a name or an IP address, an IPv6 one without brackets
    port: int  # from 1 to 65535

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses tls://HOST:PORT or tcp://HOST:PORT."""
        match = _ADDRESS.fullmatch(text)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ConfigError(
                "a scheduler's address must be tls://HOST:PORT, such as tls://gpu1:8786, "
                f"got {text!r}"
            )
        return cls(match["protocol"], match["host"].strip("[]"), int(match["port"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.protocol}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it can only be this machine."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # any other name may resolve to another machine at any time
            return False


# ---- creating certificates -----------------------------------------------------------------------

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
_CLOCKS_APART = timedelta(hours=24)  # tolerance for wrong clocks and time zones


@dataclass(frozen=True)
class CreatedCertificates:
    """Newly created certificates."""

    folder: Path  # with ca.pem, cert.pem and key.pem
    until: datetime  # end of validity


def make_certificates(folder: str | Path, days: int) -> CreatedCertificates:
    """Creates a certificate that all machines of a cluster share, and its authority.

    The authority's own key is not stored: nobody can sign another certificate for this cluster, and
    a new machine gets a copy of the folder.
    """
    require_extra("cluster")
    folder = Path(folder)
    begin = datetime.now(UTC).replace(microsecond=0)
    until = begin + timedelta(days=days)
    contents = _signed_pair(begin - _CLOCKS_APART, until)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(folder, contents)
    except FileExistsError as err:
        raise ConfigError(
            f"{err.filename} already exists, and certificates are never overwritten: choose "
            "another folder, or delete it if no machine uses it any more"
        ) from None
    except OSError as err:
        raise ConfigError(f"cannot write certificates to {folder}: {err.strerror}") from err
    return CreatedCertificates(folder, until)


def _write_new(folder: Path, contents: dict[str, bytes]) -> None:
    """Writes all files or none; the key is readable by its owner only."""
    for name in contents:  # before anything is written
        if os.path.lexists(folder / name):
            raise FileExistsError(None, None, str(folder / name))
    with ExitStack() as files:  # renamed once all are written
        for name, content in contents.items():
            unfinished = files.enter_context(atomic_file(folder / name))
            mode = 0o600 if name == KEY else 0o644
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)


def _signed_pair(begin: datetime, until: datetime) -> dict[str, bytes]:
    """An authority, a certificate that it signed, and the certificate's key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    def certificate(
        subject: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
        builder = (
            builder.not_valid_before(begin).not_valid_after(until).public_key(key.public_key())
        )
        builder = builder.subject_name(name(subject)).issuer_name(name("qlora-wgpu authority"))
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(pem)

    def usage(*, signs_certificates: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not signs_certificates, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            key_cert_sign=signs_certificates, crl_sign=signs_certificates,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip

    pem = serialization.Encoding.PEM
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signer = authority_key.public_key()
    sides = [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    return {
        KEY: key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        CERTIFICATE: certificate(
            "qlora-wgpu cluster", key,
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage(sides), False),
            (x509.SubjectAlternativeName([x509.DNSName("qlora-wgpu-cluster")]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), False),
        ),
        AUTHORITY: certificate(
            "qlora-wgpu authority", authority_key,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (usage(signs_certificates=True), True),
            (x509.SubjectKeyIdentifier.from_public_key(signer), False),
        ),
    }  # fmt: skip


# ---- reading certificates -----------------------------------------------------------------------

_MAX_BYTES = 1 << 20  # of a certificate file
_MAKE = "`qlora-wgpu certificates FOLDER` creates it"


@dataclass(frozen=True)
class Credentials:
    """Paths of the files that this machine needs to join a cluster."""

    authority: str  # certificate of the authority
    certificate: str  # of this machine, or shared by all
    key: str  # private key of the certificate

    @classmethod
    def read(cls, folder: str | Path) -> Credentials:
        """Checks that a folder's three files belong together and are valid today."""
        paths = [Path(folder) / name for name in (AUTHORITY, CERTIFICATE, KEY)]
        for path in paths:
            _check_readable(path)
        authority, certificate, key = paths
        _check_private(key)
        _check_valid(authority, certificate)
        _check_fits(certificate, key)
        return cls(*map(str, paths))


def _check_readable(path: Path) -> None:
    try:
        file_bytes(path, _MAX_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is missing from {path.parent}, which must contain {AUTHORITY}, "
            f"{CERTIFICATE} and {KEY}, the same on all machines ({_MAKE})"
        ) from None
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}") from err


def _check_private(key: Path) -> None:
    if os.name != "posix":  # elsewhere the mode does not control access
        return
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"other users of this machine can access {key} (mode {mode:o}), and could run code on "
            f"all machines of the cluster: run chmod 600 {key}"
        )


def _check_valid(authority: Path, certificate: Path) -> None:
    signers, chain = _dated(authority), _dated(certificate)
    for each, following in zip(chain, [*chain[1:], None], strict=True):
        if any(_signed(each, signer) for signer in signers):
            return
        if following is None or not _signed(each, following):
            break
    raise ConfigError(
        f"{certificate} was not signed by {authority.name} in the same folder: take all three "
        "files from one folder"
    )


def _dated(path: Path) -> list[x509.Certificate]:
    """Reads a file's certificates; the first must be valid today."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(file_bytes(path, _MAX_BYTES))
    except ValueError as err:
        raise ConfigError(f"{path} does not contain a PEM certificate") from err
    now, begin, end = datetime.now(UTC), found[0].not_valid_before_utc, found[0].not_valid_after_utc
    if now > end:
        raise ConfigError(
            f"{path} expired on {end:%Y-%m-%d}: create a new folder for all machines of the "
            f"cluster ({_MAKE})"
        )
    if now < begin:
        raise ConfigError(
            f"{path} is not valid before {begin:%Y-%m-%d}: check this machine's clock"
        )
    return found


def _signed(certificate: x509.Certificate, signer: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_fits(certificate: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
            certificate, key, password=_no_password
        )
    except (ssl.SSLError, ValueError) as err:
        if getattr(err, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key} is not the key of {certificate.name}: take all three files from one folder"
            ) from err
        raise ConfigError(f"{key} does not contain a PEM key without a password") from err


def _no_password() -> str:
    raise ValueError("a key with a password")  # instead of prompting for one


# ---- Dask's security -----------------------------------------------------------------------------

LOOPBACK = "127.0.0.1"


def connection_security(
    scheduler: str, certificates: str | None, *, allow_plain_tcp: bool
) -> Security:
    """Dask's settings for connecting to a scheduler and for accepting connections.

    ``certificates`` is a folder, or None for those of Dask's own configuration
    (distributed.comm.tls). ``allow_plain_tcp`` permits tcp:// to another machine.
    """
    require_extra("cluster")
    address = Address.parse(scheduler)
    if address.protocol == "tcp":
        return _plain(address, certificates, allowed=allow_plain_tcp)
    return _mutual(address, certificates)


def temporary_security() -> Security:
    """TLS for local processes, in which other users could run code otherwise; in memory only."""
    require_extra("cluster")
    from distributed import Security

    return Security.temporary()


def listening_host(scheduler: str) -> str | None:
    """The address that a worker listens on; None lets Dask choose, which takes all addresses."""
    address = Address.parse(scheduler)
    if not address.is_loopback:
        return None
    return "::1" if ":" in address.host else LOOPBACK


def _plain(address: Address, certificates: str | None, *, allowed: bool) -> Security:
    from distributed import Security

    if certificates is not None:
        raise ConfigError(
            f"{address} does not use certificates, but the folder {certificates} is set: use "
            f"tls://{str(address).removeprefix('tcp://')}, or remove the folder"
        )
    if not (address.is_loopback or allowed):
        raise ConfigError(
            f"{address} is plain TCP to another machine, so anyone on the network could run code "
            "on all machines: use tls:// with certificates (`qlora-wgpu certificates FOLDER`), or "
            "allow it on a safe network with cluster.allow_plain_tcp=true (--allow-plain-tcp for "
            "a worker)"
        )
    return Security(require_encryption=False)


def _mutual(address: Address, certificates: str | None) -> Security:
    from distributed import Security

    if certificates is None:
        configured = Security(require_encryption=True)
        if not (configured.tls_ca_file and configured.tls_client_cert):
            raise ConfigError(
                f"{address} requires certificates: set cluster.certificates (--certificates for a "
                "worker) to their folder (`qlora-wgpu certificates FOLDER` creates one)"
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
