"""Makes the certificate that lets machines into one cluster."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_wgpu.checkpoint.atomic import atomic_file
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.extras import require_extra

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
_CLOCKS_APART = timedelta(hours=24)  # of machines whose clocks or time zones are set wrongly


@dataclass(frozen=True)
class Made:
    """What was made."""

    folder: Path  # where ca.pem, cert.pem and key.pem are
    until: datetime  # the last moment at which the certificate is valid


def make_certificates(folder: str | Path, days: int) -> Made:
    """Makes a certificate that all machines of a cluster share, and the authority that signed it.

    The authority's own key is forgotten at once: nobody can sign another certificate for this
    cluster, and whoever is to be let in gets a copy of the folder.
    """
    require_extra("cluster")
    folder = Path(folder)
    begin = datetime.now(UTC).replace(microsecond=0)
    until = begin + timedelta(days=days)
    contents = _signed(begin - _CLOCKS_APART, until)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(folder, contents)
    except FileExistsError as err:
        raise ConfigError(
            f"{err.filename} is there already, and certificates are never overwritten: name "
            "another folder, or delete it if no machine uses it any more"
        ) from None
    except OSError as err:
        raise ConfigError(f"certificates cannot be written to {folder}: {err.strerror}") from err
    return Made(folder, until)


def _write_new(folder: Path, contents: dict[str, bytes]) -> None:
    """Writes all files or none; those with a key can be read by their owner alone."""
    for name in contents:  # before anything is written
        if os.path.lexists(folder / name):
            raise FileExistsError(None, None, str(folder / name))
    with ExitStack() as files:  # they get their names once all are written
        for name, content in contents.items():
            unfinished = files.enter_context(atomic_file(folder / name))
            mode = 0o600 if name == KEY else 0o644
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)


def _signed(begin: datetime, until: datetime) -> dict[str, bytes]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = serialization.Encoding.PEM
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _authority(authority_key, begin, until)
    certificate = _certificate(key, authority, authority_key, begin, until)
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {
        KEY: secret,
        CERTIFICATE: certificate.public_bytes(pem),
        AUTHORITY: authority.public_bytes(pem),
    }


def _authority(
    key: ec.EllipticCurvePrivateKey, begin: datetime, until: datetime
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    name = _name("qlora-wgpu authority")
    public = key.public_key()
    return (
        _builder(begin, until)
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    until: datetime,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    public = key.public_key()
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _builder(begin, until)
        .subject_name(_name("qlora-wgpu cluster"))
        .issuer_name(authority.subject)
        .public_key(public)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("qlora-wgpu-cluster")]), critical=False
        )
        .add_extension(signer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(begin: datetime, until: datetime) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(until)
    )


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
