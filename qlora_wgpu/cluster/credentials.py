"""Reads a folder of certificates, and tells what is wrong with it before anybody else does."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_wgpu.cluster.certificates import AUTHORITY, CERTIFICATE, KEY
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import file_bytes

if TYPE_CHECKING:
    from cryptography import x509

_MOST = 1 << 20  # bytes of such a file
_MAKE = "`qlora-wgpu certificates FOLDER` makes such a folder"


@dataclass(frozen=True)
class Credentials:
    """Paths of the files that let this machine into a cluster.

    Attributes:
        authority: The certificate of who signs.
        certificate: This machine's, or all machines'.
        key: The secret that goes with it.
    """

    authority: str
    certificate: str
    key: str

    @classmethod
    def read(cls, folder: str | Path) -> Credentials:
        """Finds the three files of a folder and checks that they fit and are valid today.

        Raises:
            ConfigError: If one is missing, cannot be read, is not what it is called, has expired,
                or is of another cluster, or if others than its owner can read the key.
        """
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
        file_bytes(path, _MOST)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} has no {path.name}: it is to hold {AUTHORITY}, {CERTIFICATE} and "
            f"{KEY}, the same on all machines ({_MAKE})"
        ) from None
    except OSError as err:
        raise ConfigError(f"{path} cannot be read: {err.strerror}") from err


def _check_private(key: Path) -> None:
    if os.name != "posix":  # elsewhere a mode says nothing of who can read a file
        return
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{key} can be read or changed by others on this machine (mode {mode:o}), who could "
            f"then run code on all machines of the cluster: chmod 600 {key}"
        )


def _check_valid(authority: Path, certificate: Path) -> None:
    signers, chain = _dated(authority), _dated(certificate)
    for each, following in zip(chain, [*chain[1:], None], strict=True):
        if any(_signed(each, signer) for signer in signers):
            return
        if following is None or not _signed(each, following):
            break
    raise ConfigError(
        f"{certificate} was not signed by {authority.name} beside it: take all three files from "
        "one folder"
    )


def _dated(path: Path) -> list[x509.Certificate]:
    """The certificates of a file, of which the first may be used today."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(file_bytes(path, _MOST))
    except ValueError as err:
        raise ConfigError(f"{path} holds no certificate in PEM form") from err
    now, begin, end = datetime.now(UTC), found[0].not_valid_before_utc, found[0].not_valid_after_utc
    if now > end:
        raise ConfigError(
            f"{path} expired on {end:%Y-%m-%d}: make a new folder for all machines of the cluster "
            f"({_MAKE})"
        )
    if now < begin:
        raise ConfigError(
            f"{path} is valid from {begin:%Y-%m-%d} on only: is this machine's clock right?"
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
        raise ConfigError(f"{key} holds no key in PEM form that needs no password") from err


def _no_password() -> str:
    raise ValueError("a key with a password")  # instead of asking for one
