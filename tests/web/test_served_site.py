"""What the server of a site answers: this machine's browser alone, and the site's files alone."""

import http.client
import socket
import socketserver
import threading

import pytest

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs.web import SiteServer
from qlora_wgpu.web import MANIFEST


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    with SiteServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def ask(site, path, host=None):
    port = site.server_address[1]
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = client.getresponse()
    answer.read()
    assert answer.getheader("Cache-Control") == "no-cache"
    client.close()
    return answer.status


@pytest.mark.parametrize(
    ("path", "status"),
    [(f"/{MANIFEST}", 200), ("/%00", 404), ("/a%00b/", 404), ("/link", 404), ("/../secret", 404),
     ("/%2e%2e/secret", 404), ("/" + "a" * 5000, 404), ("/nothing", 404)],
)  # fmt: skip
def test_only_the_sites_files_are_given(site, path, status, capfd):
    assert ask(site, path) == status
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("localhost", 200), ("evil.example:80", 403), ("evil.example", 403)],
)
def test_another_hosts_name_is_refused(site, host, status):
    assert ask(site, f"/{MANIFEST}", host) == status


def test_no_more_connections_than_it_has_places_for_are_at_work(site):
    waiting = [socket.create_connection(site.server_address) for _ in range(60)]
    try:
        before = threading.active_count()
        assert before < 50
    finally:
        for each in waiting:
            each.close()
    assert ask(site, f"/{MANIFEST}") == 200


@pytest.mark.parametrize("fails", [False, True])
def test_a_connection_gives_its_place_back_when_it_ends(monkeypatch, fails):
    begun = []

    def begin(self, request, address):
        begun.append(request)
        if fails:
            raise RuntimeError("no more threads")

    def work(self, request, address):
        raise OSError("has gone")

    monkeypatch.setattr(socketserver.ThreadingTCPServer, "process_request", begin)
    monkeypatch.setattr(socketserver.ThreadingTCPServer, "process_request_thread", work)
    server = SiteServer.__new__(SiteServer)
    server._free = threading.BoundedSemaphore(1)
    if fails:
        with pytest.raises(RuntimeError, match="no more threads"):
            server.process_request("a", None)
    else:
        server.process_request("a", None)
        assert not server._free.acquire(blocking=False)
        with pytest.raises(OSError, match="has gone"):
            server.process_request_thread("a", None)
    assert server._free.acquire(blocking=False) and begun == ["a"]


def test_a_folder_without_a_site_and_a_port_beyond_all_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a site"):
        SiteServer(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="cannot use port 99999"):
        SiteServer(tmp_path, 99_999)
    with SiteServer(tmp_path) as server:
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
