"""Where a row's image comes from: a file next to the data, or bytes in the row itself.

Images are never downloaded. They are decoded in a child process (``sandbox/images.py``), and known
by the SHA-256 of their files.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import numpy as np

from qlora_wgpu.errors import DataError, QLoRAError, install_command, reason
from qlora_wgpu.files import file_bytes, open_file
from qlora_wgpu.images.pixels import RGB
from qlora_wgpu.limits import IMAGE_BYTES, MAX_QUOTED
from qlora_wgpu.sandbox.process import SandboxError, SandboxProcess
from qlora_wgpu.visible import quoted

# ---- decoding ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _process() -> SandboxProcess:
    if importlib.util.find_spec("PIL") is None:
        raise DataError(f"images require Pillow: {install_command('images')}")
    return SandboxProcess("sandbox.images")


def _call(name: str, *args: Any) -> Any:
    process = _process()
    from qlora_wgpu.sandbox import images

    try:
        return process.call(getattr(images, name), *args)
    except SandboxError as err:
        raise DataError(f"decoding it was stopped: it {err}") from err


def image_size(content: bytes) -> tuple[int, int]:
    """Height and width in pixels of an image's file, by its header."""
    height, width = _call("size_of", content)
    return int(height), int(width)


def decode_image(content: bytes) -> RGB:
    """The RGB pixels of an image's file, (height, width, 3), as transformers reads them.

    Raises:
        DataError: If the file is damaged, too large or of an unsupported format.
    """
    process = _process()
    with process.in_turn:
        height, width = _call("decode", content)
        rgb = bytearray()
        while piece := _call("pixels", len(rgb) // (3 * width)):
            rgb += base64.b64decode(piece)
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


# ---- sources -------------------------------------------------------------------------------------


class Content(Protocol):
    """The bytes of an image's file."""

    def read(self) -> bytes:
        """Reads them; an OSError if that fails."""


@dataclass(frozen=True)
class FileContent:
    """An image's file by its path."""

    path: Path

    def read(self) -> bytes:
        """The file, which must have at most ``IMAGE_BYTES``."""
        return file_bytes(self.path, IMAGE_BYTES)

    @property
    def state(self) -> list[int]:
        """What changes if the file is replaced: its size, and when it was written."""
        status = self.path.stat()
        return [status.st_size, status.st_mtime_ns]


@dataclass(frozen=True)
class StoredContent:
    """An image within a file of the cache."""

    path: Path
    begin: int
    end: int

    def read(self) -> bytes:
        """The bytes of the image."""
        with open_file(self.path) as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin)


@dataclass(frozen=True)
class RowContent:
    """An image within its row."""

    content: bytes

    def read(self) -> bytes:
        """The bytes."""
        return self.content


@dataclass(frozen=True)
class ImageSource:
    """An image of a row: where it is, what it is called in messages, and its size."""

    name: str
    content: Content
    key: str = ""  # the SHA-256 of its file
    height: int = 0
    width: int = 0

    def measured(self) -> ImageSource:
        """The same image with its key and its size.

        Raises:
            DataError: If it cannot be read or is damaged.
        """
        content = self._read()
        height, width = self._named(image_size, content)
        return replace(self, key=key_of(content), height=height, width=width)

    def decoded(self) -> RGB:
        """Its pixels; it must be the image that was measured.

        Raises:
            DataError: If it cannot be read, is damaged or was changed meanwhile.
        """
        content = self._read()
        if self.key and key_of(content) != self.key:
            raise DataError(f"{self.name} was changed while the run read it: start again")
        rgb: RGB = self._named(decode_image, content)
        return rgb

    def _read(self) -> bytes:
        try:
            return self.content.read()
        except (OSError, ValueError) as err:  # a ValueError if a path has a null character
            missing = isinstance(err, FileNotFoundError | NotADirectoryError)
            why = "it does not exist" if missing else reason(err)
            raise DataError(f"cannot read {self.name}: {why}") from err

    def _named(self, function: Any, content: bytes) -> Any:
        try:
            return function(content)
        except QLoRAError as err:
            raise DataError(f"cannot read {self.name}: {err}") from err


def key_of(content: bytes) -> str:
    """The key of an image's file."""
    return hashlib.sha256(content).hexdigest()


# ---- references in rows --------------------------------------------------------------------------

_URI = re.compile(r"data:([^,]{0,200}),", re.IGNORECASE)
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_FILE = "file://"
_NESTED = 4
_KEYS = ("bytes", "base64", "path", "url", "image", "image_url")  # of an object, the first counts


def image_source(value: Any, folder: Path | None, name: str, nested: int = 0) -> ImageSource:
    """The image that a row's value refers to.

    Args:
        value: A path, a ``data:`` URI, bytes, an image of Pillow, or an object with one of these
            under ``path``, ``url``, ``image``, ``bytes`` or ``base64`` (as text).
        folder: What paths are relative to; None for rows in which they are not read.
        name: What messages call it, such as ``image 2``.
        nested: The number of objects that the value is within.

    Raises:
        DataError: If it is something else, or would have to be downloaded.
    """
    if isinstance(value, Mapping):
        if nested == _NESTED:
            raise DataError(f"{name} has more than {_NESTED} objects within each other")
        key = next((key for key in _KEYS if value.get(key) is not None), None)
        if key is None:
            raise DataError(
                f"{name} must have one of the keys path, url, image, bytes and base64, got "
                f"{', '.join(map(quoted, list(value)[:8])) or 'none'}"
            )
        if key in ("bytes", "base64") and isinstance(value[key], str):
            return ImageSource(name, RowContent(_from_base64(value[key], name)))
        return image_source(value[key], folder, name, nested + 1)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageSource(name, RowContent(bytes(value)))
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value:
        return _of_text(value, folder, name)
    if hasattr(value, "save") and hasattr(value, "getexif"):  # an image of Pillow
        return ImageSource(name, RowContent(_as_png(value)))
    raise DataError(
        f"{name} must be a path, a data: URI or bytes, got "
        f"{quoted(value) if isinstance(value, str) else type(value).__name__}"
    )


def is_remote(text: str) -> bool:
    """Whether a reference is a URI, not a path."""
    return _URI.match(text) is not None or _REMOTE.match(text) is not None


def _of_text(text: str, folder: Path | None, name: str) -> ImageSource:
    if match := _URI.match(text):
        kind, body = match[1], text[match.end() :]
        is_coded = kind.lower().endswith(";base64")
        content = _from_base64(body, name) if is_coded else unquote_to_bytes(body)
        return ImageSource(name, RowContent(content))
    if is_remote(text) and not text.startswith(_FILE):
        advice = "send a data: URI" if folder is None else "download it, and refer to the file"
        raise DataError(f"{name} is {quoted(text)}, but images are not downloaded: {advice}")
    if folder is None:
        raise DataError(f"{name} must be a data: URI, got {quoted(text)}")
    path = folder / home_expanded(text.removeprefix(_FILE))
    shown = text if len(text) <= MAX_QUOTED else f"…{text[1 - MAX_QUOTED :]}"  # its end tells more
    return ImageSource(f"{name} ({quoted(shown)})", FileContent(path))


def home_expanded(text: str) -> Path:
    """A path with the home folder for ``~``; of unknown users it is unchanged."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _from_base64(text: str, name: str) -> bytes:
    if len(text) > 4 * IMAGE_BYTES:
        raise DataError(f"{name} is larger than {IMAGE_BYTES >> 20} MiB")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as err:
        raise DataError(f"{name} is not valid base64 ({err})") from err


def _as_png(image: Any) -> bytes:
    from PIL import ImageOps

    file = io.BytesIO()
    ImageOps.exif_transpose(image).convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()
