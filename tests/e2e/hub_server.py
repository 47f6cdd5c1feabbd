"""A small server that speaks the Hugging Face hub's download protocol, for folders on disk."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONVERTED = "refs/convert/parquet"
CONVERTED_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


class Handler(BaseHTTPRequestHandler):
    """Repositories are ``models/owner/name`` and ``datasets/owner/name`` below ``root``.

    ``converted/owner/name`` is another branch of a data set.
    """

    root: Path
    log: list[str]

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, *, body):
        path = unquote(urlsplit(self.path).path).strip("/")
        self.log.append(f"{self.command} {path}")
        parts = path.split("/")
        if parts[0] == "api" and len(parts) >= 4:
            folder, commit = self.root / "/".join(parts[1:4]), COMMIT
            if not folder.is_dir():
                return self.missing("RepoNotFound")
            if path.endswith("/revision/nothing"):
                return self.missing("RevisionNotFound")
            if path.endswith((CONVERTED, CONVERTED_COMMIT)):
                folder, commit = self.root / "converted" / "/".join(parts[2:4]), CONVERTED_COMMIT
                if not folder.is_dir():
                    return self.missing("RevisionNotFound")
            names = sorted(
                p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
            )
            if "tree" in parts:
                listing = [{"type": "file", "path": n, "size": (folder / n).stat().st_size,
                          "oid": self.tag(folder / n)} for n in names]  # fmt: skip
            else:
                listing = {"id": "/".join(parts[2:4]), "sha": commit, "private": False,
                         "siblings": [{"rfilename": n} for n in names]}  # fmt: skip
            return self.send(json.dumps(listing).encode(), "application/json", body=body)
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        if len(parts) < 5 or parts[2] != "resolve":
            return self.missing("EntryNotFound")
        commit = COMMIT
        if parts[3] == CONVERTED_COMMIT:
            kind, commit = "converted", CONVERTED_COMMIT
        file = self.root / kind / parts[0] / parts[1] / "/".join(parts[4:])
        if not file.is_file():
            return self.missing("EntryNotFound")
        return self.send(
            file.read_bytes(), "application/octet-stream", body=body, file=file, commit=commit
        )

    @staticmethod
    def tag(file):
        return hashlib.sha256(file.read_bytes()).hexdigest()[:40]

    def missing(self, code):
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, content, kind, *, body, file=None, commit=COMMIT):
        first = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes=") and file is not None:
            first = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if file is not None:
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{self.tag(file)}"')
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            self.wfile.write(content[first:])


@contextmanager
def serving(root: Path):
    """The address of a server, and the requests it has had."""
    handler = type("Handler", (Handler,), {"root": root, "log": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.log
    finally:
        server.shutdown()
        server.server_close()
