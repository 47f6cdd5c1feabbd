"""A page that trains a run's model in a browser, and a local server for it."""

import functools
import http
import http.server
import json
import shutil
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.atomic import atomic_folder
from qlora_wgpu.config import Config
from qlora_wgpu.data import load_dataset
from qlora_wgpu.errors import ConfigError, DataError, option, reason
from qlora_wgpu.files import exists, file_bytes, is_file
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.training.data import preparation
from qlora_wgpu.web import MANIFEST, Site, SiteOptions, write_site
from qlora_wgpu.web.site import put_page

_HOSTS = ("127.0.0.1", "localhost")
_CONNECTIONS = 32  # at a time
_TIMEOUT = 30.0  # seconds that a client may be silent
_SAMPLES = (".jsonl", ".json", ".csv", ".txt")  # formats that the page reads


def write_page(
    settings: Config,
    out: str | Path,
    options: SiteOptions | None = None,
    *,
    with_data: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Site:
    """Writes a folder for any web server; an existing site is replaced once it is complete.

    ``with_data`` includes ``data.train`` as an example.
    """
    out = Path(out)
    if exists(out) and not is_file(out / MANIFEST):
        raise ConfigError(f"{out} already exists and is not a site: choose another --out")
    options = options or SiteOptions()
    sample = _sample(settings) if with_data else None
    source = OpenedModel.open(base_in(settings))
    if sample is not None:
        length = max(options.buckets, default=0) or settings.data.max_seq_length
        data = settings.data.model_copy(update={"max_seq_length": length})
        how = preparation(data, images=source.images)
        rows = load_dataset(sample, source.tokenizer, length, how=how)  # as the page will
        if rows.image_sources:
            raise DataError(
                f"{sample.name} has images, but the page only trains on text: leave "
                f"{option('with_data')} out, or name data without images"
            )
    with atomic_folder(out) as unfinished:
        put_page(unfinished)
        if sample is not None:
            shutil.copyfile(sample, unfinished / sample.name)
        site = write_site(
            settings, source.pretrained, source.path, unfinished, options,
            sample=None if sample is None else sample.name, progress=progress,
        )  # fmt: skip
    return site.moved(out)


def _sample(settings: Config) -> Path:
    path = Path(settings.data.train or "data.train")
    if not is_file(path) or path.suffix not in _SAMPLES:
        raise DataError(
            f"{path} cannot be included: the page reads files that end in {', '.join(_SAMPLES)}"
        )
    return path


class SiteServer(socketserver.ThreadingTCPServer):
    """Serves a site on the loopback address, for this machine only."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128  # a browser asks for all modules at once
    _free = threading.BoundedSemaphore(_CONNECTIONS)

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        folder = Path(folder)
        try:
            json.loads(file_bytes(folder / MANIFEST, OWN_JSON_BYTES))
        except (OSError, ValueError):
            raise ConfigError(
                f"{folder} is not a site: write one with qlora-wgpu web RUN.yaml --out {folder}"
            ) from None
        try:
            super().__init__(
                ("127.0.0.1", port), functools.partial(_Handler, directory=str(folder))
            )
        except (OSError, OverflowError) as err:
            raise ConfigError(
                f"cannot use port {port} ({reason(err)}): choose another --port"
            ) from err

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a new thread, once fewer than the maximum are running."""
        self._free.acquire()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, then releases the thread's place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""

    @property
    def url(self) -> str:
        """The address of the site."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012 - as the base class declares it
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".plan": "application/octet-stream",
    }

    timeout = _TIMEOUT

    def send_head(self) -> Any:
        """Answers only requests to this machine, and only with files of the site."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS:  # DNS rebinding: another site's name resolves to here
            self.send_error(http.HTTPStatus.FORBIDDEN, "this server is for 127.0.0.1 only")
            return None
        try:
            inside = Path(self.translate_path(self.path)).resolve()
            is_inside = inside.is_relative_to(Path(self.directory).resolve())
        except (ValueError, OSError):  # a NUL, or a name that is too long
            is_inside = False
        if not is_inside:
            self.send_error(http.HTTPStatus.NOT_FOUND)
            return None
        return super().send_head()

    def end_headers(self) -> None:
        """Disables caching, since the site may be rewritten."""
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Logs nothing."""
