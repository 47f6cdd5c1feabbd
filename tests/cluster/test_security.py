"""Who is let in by what the settings say."""

import ssl

import dask
import pytest

from qlora_wgpu.cluster.security import (
    Address,
    connection_security,
    listening_host,
    make_certificates,
    temporary_security,
)
from qlora_wgpu.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("tls://gpu1:8786", False),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:65535", True),
        ("tcp://[::1]:8786", True),
        ("tcp://localhost:8786", True),
        ("tcp://192.168.1.5:8786", False),
        ("tcp://localhost.example.org:8786", False),
        ("tcp://127.0.0.1.example.org:8786", False),
        ("tcp://0.0.0.0:8786", False),
    ],
)
def test_addresses(text, loopback):
    address = Address.parse(text)
    assert str(address) == text
    assert address.is_loopback is loopback
    assert (listening_host(text) is not None) is loopback


@pytest.mark.parametrize(
    "text",
    ["", "gpu1:8786", "http://gpu1:8786", "tls://gpu1", "tls://gpu1:0", "tls://gpu1:65536",
     "tls://a@gpu1:8786", "tls://gpu1:8786/x", "tls:// gpu1:8786", "tls://::1:8786"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="tls://HOST:PORT"):
        Address.parse(text)


def test_both_sides_show_a_certificate(tmp_path):
    folder = str(make_certificates(tmp_path / "c", 30).folder)
    security = connection_security("tls://gpu1:8786", folder, allow_plain_tcp=False)
    assert security.require_encryption
    for role in ("client", "scheduler", "worker"):
        for arguments in (security.get_connection_args(role), security.get_listen_args(role)):
            context = arguments["ssl_context"]
            assert context.verify_mode == ssl.CERT_REQUIRED
            assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_plain_tcp_stays_on_this_machine_unless_it_is_allowed():
    assert not connection_security(
        "tcp://127.0.0.1:8786", None, allow_plain_tcp=False
    ).require_encryption
    with pytest.raises(ConfigError, match=r"anyone on the network.*allow_plain_tcp"):
        connection_security("tcp://gpu1:8786", None, allow_plain_tcp=False)
    assert not connection_security("tcp://gpu1:8786", None, allow_plain_tcp=True).require_encryption


def test_certificates_are_never_left_unused(tmp_path):
    with pytest.raises(ConfigError, match="tls://gpu1:8786, or remove the folder"):
        connection_security("tcp://gpu1:8786", str(tmp_path), allow_plain_tcp=True)


def test_tls_needs_certificates_from_somewhere(tmp_path):
    with pytest.raises(ConfigError, match=r"requires certificates.*--certificates"):
        connection_security("tls://gpu1:8786", None, allow_plain_tcp=True)
    folder = make_certificates(tmp_path / "c", 30).folder
    own = {"cert": "cert.pem", "key": "key.pem"}
    files = {f"{role}.{k}": name for role in ("client", "worker") for k, name in own.items()}
    files["ca-file"] = "ca.pem"
    tls = {f"distributed.comm.tls.{key}": str(folder / name) for key, name in files.items()}
    with dask.config.set(tls):
        security = connection_security("tls://gpu1:8786", None, allow_plain_tcp=False)
    assert security.tls_ca_file == str(folder / "ca.pem")
    assert security.require_encryption


def test_processes_of_this_machine_get_a_certificate_of_their_own():
    first, second = (temporary_security() for _ in range(2))
    assert first.require_encryption
    assert first.tls_client_key != second.tls_client_key
