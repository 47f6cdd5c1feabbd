"""Browsers without a driver: a page is opened headless, and posts what it found."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

_LOG = logging.getLogger(__name__)
_PREFERENCES = {
    "dom.webgpu.enabled": "true",
    "gfx.webgpu.ignore-blocklist": "true",
    "browser.shell.checkDefaultBrowser": "false",
    "datareporting.policy.dataSubmissionEnabled": "false",
    "toolkit.telemetry.enabled": "false",
    "app.normandy.enabled": "false",
    "browser.safebrowsing.malware.enabled": "false",
    "network.captive-portal-service.enabled": "false",
    "network.connectivity-service.enabled": "false",
}
_CHROMIUM = [
    "--headless=new",
    "--no-sandbox",
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--no-first-run",
    "--disable-background-networking",
]


class Server:
    """Folders over HTTP on the loopback address; what pages post lies in a queue.

    Attributes:
        posted: What was posted, decoded: of how far a page is, by ``/progress``, or its result.
        requested: The paths of all requests, in order.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        aliases: Mapping[str, str] | None = None,
        missing: Collection[str] = (),
        *,
        under: str = "",
        types: Mapping[str, str] | None = None,
        packs: bool = False,
        stale: Mapping[str, bytes] | None = None,
        earlier: Mapping[str, bytes] | None = None,
        cut: str = "",
    ) -> None:
        """Serves at once.

        Args:
            folders: Whose files; the first that has one counts.
            aliases: Other names of files.
            missing: Files that are not there.
            under: A path under which all files are, too, such as ``people/me/``.
            types: MIME types by the ends of names.
            packs: Whether files are sent as gzip.
            stale: What files were before: it is sent the first time, to be kept for an hour.
            earlier: What files were before: it is sent the first time, not to be kept.
            cut: The file of which only a half is sent.
        """
        self.posted: Queue[Any] = Queue()
        self.requested: list[str] = []
        posted, requested, others = self.posted, self.requested, dict(aliases or {})
        before = {name: (content, "max-age=3600") for name, content in (stale or {}).items()}
        before |= {name: (content, "no-store") for name, content in (earlier or {}).items()}

        class Handler(http.server.SimpleHTTPRequestHandler):
            extensions_map = {  # noqa: RUF012 - as the base class declares it
                **http.server.SimpleHTTPRequestHandler.extensions_map,
                ".mjs": "text/javascript",
                **(types or {}),
            }

            def translate_path(self, path: str) -> str:
                name = path.partition("?")[0].lstrip("/").removeprefix(under)
                if name in missing:
                    return str(folders[0] / "missing" / name)
                if name in others:  # the file of another name, in the last folder that has it
                    name = others[name]
                    return str(next(f / name for f in folders[::-1] if (f / name).is_file()))
                found = next((f / name for f in folders if (f / name).is_file()), None)
                return str(found or folders[0] / name)

            def do_GET(self) -> None:
                requested.append(self.path)
                path = Path(self.translate_path(self.path))
                name = self.path.partition("?")[0].lstrip("/").removeprefix(under)
                if name in before:
                    content, kept = before.pop(name)
                    return self._send(content, len(content), {"Cache-Control": kept})
                if name == cut:
                    content = path.read_bytes()
                    return self._send(content[: len(content) // 2], len(content), {})
                if not packs or not path.is_file():
                    return super().do_GET()
                content = gzip.compress(path.read_bytes())
                self._send(content, len(content), {"Content-Encoding": "gzip"})

            def _send(self, content: bytes, length: int, headers: Mapping[str, str]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", self.guess_type(self.path.partition("?")[0]))
                self.send_header("Content-Length", str(length))
                for header, value in headers.items():
                    self.send_header(header, value)
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                posted.put((self.path, content))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        class Waiting(http.server.ThreadingHTTPServer):
            request_queue_size = 128  # a browser asks for all modules at once

        self._server = Waiting(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def browser(name: str, url: str, *, webgpu: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A browser with a profile of its own, showing a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            _command(name, profile, url, webgpu),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its GPU's process, too
            process.wait()


def _command(name: str, profile: str, url: str, webgpu: bool) -> list[str]:
    if name == "firefox":
        lines = [f'user_pref("{key}", {value});' for key, value in _PREFERENCES.items()]
        if not webgpu:
            lines.append('user_pref("dom.webgpu.enabled", false);')
        (Path(profile) / "user.js").write_text("\n".join(lines) + "\n")
        found = shutil.which("firefox-esr") or shutil.which("firefox")
        assert found, "no Firefox: apt-get install firefox-esr"
        return [found, "--headless", "--no-remote", "--profile", profile, url]
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "no Chromium: apt-get install chromium"
    options = _CHROMIUM if webgpu else [o for o in _CHROMIUM if "webgpu" not in o]
    return [found, *options, f"--user-data-dir={profile}", url]


def result_of(name: str, server: Server, page: str, seconds: float = 600.0, **more: Any) -> Any:
    """What a page posts in the end.

    Args:
        name: The browser.
        server: It serves the page.
        page: Its path.
        seconds: How long the page may be silent.
        **more: Goes to ``browser``.
    """
    last = "nothing"
    with browser(name, f"{server.url}/{page}", **more):
        while True:
            try:
                path, found = server.posted.get(timeout=seconds)
            except Empty:
                raise AssertionError(
                    f"{name} posted nothing in {seconds:g} s; the last that it told of was {last}, "
                    f"and it asked for {server.requested[-5:]}"
                ) from None
            if path != "/progress":
                break
            last = found
            _LOG.info("%s: %s", name, found)
    assert "error" not in found, found["error"]
    return found
