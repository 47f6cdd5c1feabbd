"""Certificates are made once, for their owner alone; what is wrong with them is one sentence."""

import os
import shutil
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from support.commands import run_here

from qlora_wgpu.cluster import security
from qlora_wgpu.cluster.security import Credentials, make_certificates
from qlora_wgpu.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    return make_certificates(tmp_path / "certificates", 30).folder


def test_a_folder_holds_what_is_needed_and_no_key_of_the_authority(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sum("PRIVATE KEY" in path.read_text() for path in folder.iterdir()) == 1
    read = Credentials.read(folder)
    assert read.key == str(folder / "key.pem")


def test_what_a_certificate_may_be_used_for_binds_whoever_reads_it(folder):
    """Uses and the place in the chain are critical: who does not know them refuses."""
    read = {n: x509.load_pem_x509_certificate((folder / f"{n}.pem").read_bytes())
            for n in ("ca", "cert")}  # fmt: skip
    for name, certificate in read.items():
        marked = {each.value.__class__.__name__: each for each in certificate.extensions}
        assert marked["BasicConstraints"].critical and marked["KeyUsage"].critical
        assert marked["BasicConstraints"].value.ca == (name == "ca")
        assert marked["KeyUsage"].value.key_cert_sign == (name == "ca")
        assert marked["KeyUsage"].value.digital_signature == (name == "cert")
    uses = read["cert"].extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert len(set(uses.value)) == 2 and not uses.critical
    assert read["cert"].issuer == read["ca"].subject


def test_validity_is_what_was_asked_for(tmp_path):
    begin = datetime.now(UTC)
    made = make_certificates(tmp_path / "c", 7).until - timedelta(days=7)
    assert begin - timedelta(seconds=1) <= made <= datetime.now(UTC)  # files hold whole seconds


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_nothing_is_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"{name} already exists.*never overwritten"):
        make_certificates(tmp_path, 30)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_cannot_be_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write certificates to"):
        make_certificates(tmp_path / "file" / "certificates", 30)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} is missing from.*qlora-wgpu certificates"):
        Credentials.read(folder)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_a_damaged_file_is_named(folder, name):
    (folder / name).write_text("-----BEGIN NOTHING-----\n")
    with pytest.raises(ConfigError, match=rf"{name} does not contain a PEM"):
        Credentials.read(folder)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_files_of_two_clusters_do_not_fit(folder, tmp_path, name):
    other = make_certificates(tmp_path / "other", 30).folder
    shutil.copy(other / name, folder / name)
    (folder / "key.pem").chmod(0o600)
    with pytest.raises(ConfigError, match="take all three files from one folder"):
        Credentials.read(folder)


@pytest.mark.skipif(os.name != "posix", reason="modes say nothing elsewhere")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_is_refused(folder, mode):
    (folder / "key.pem").chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod 600"):
        Credentials.read(folder)


@pytest.mark.parametrize(("days", "found"), [(-1, "expired on"), (1, "check this machine's clock")])
def test_a_certificate_has_its_time(tmp_path, monkeypatch, days, found):
    if days > 0:  # its validity begins in two days
        monkeypatch.setattr(security, "_CLOCKS_APART", timedelta(days=-2))
    folder = make_certificates(tmp_path / "c", days + 3 if days > 0 else days).folder
    with pytest.raises(ConfigError, match=found):
        Credentials.read(folder)


def test_the_command_says_what_it_made_and_what_is_next(tmp_path):
    begin = datetime.now(UTC)
    done = run_here("certificates", "c", "--days", "20", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    days = (begin, datetime.now(UTC))  # which differ at midnight
    assert any(f"{day + timedelta(days=20):%Y-%m-%d}" in done.stdout for day in days)
    assert "scp -rp c MACHINE:" in done.stdout
    for days, code in (("0", 2), ("1", 0), ("3650", 0), ("3651", 2)):
        asked = run_here("certificates", f"for {days}", "--days", days, cwd=tmp_path)
        assert asked.returncode == code, asked.stderr
    again = run_here("certificates", "c", cwd=tmp_path)
    assert again.returncode == 2
    assert "never overwritten" in again.stderr
