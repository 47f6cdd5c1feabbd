"""A hub on this machine that takes a commit, small files within it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        page = f"http://{self.headers['Host']}/me/mine"
        if self.path.endswith("/preupload/main"):
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in json.loads(body)["files"]]  # fmt: skip
            self._send({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._send({"commitOid": "0" * 40, "commitUrl": f"{page}/commit/0", "success": True})
        else:
            self._send({"url": page, "name": "me/mine", "id": "1"})

    def do_GET(self) -> None:
        self._send({"id": "me/mine", "sha": "0" * 40, "siblings": [], "private": False})

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def local_hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its address, and the files that it is sent."""
    handler = type("Handler", (_Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.files
    finally:
        server.shutdown()
        server.server_close()
