"""The files of a site: written once, by content, and listed with their hashes."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.limits import MIB

FILE_BYTES = 64 * MIB  # of weights: static hosts refuse larger ones
_ALIGNMENT = 4  # what a queue writes begins and ends with whole words


class SiteFiles:
    """A folder that fills with files.

    Attributes:
        folder: Where they are.
        listed: Size and SHA-256 of each file that a page fetches, by name.
    """

    def __init__(self, folder: Path) -> None:
        """Starts without any."""
        self.folder = folder
        self.listed: dict[str, dict[str, Any]] = {}

    def put(self, name: str, content: bytes) -> str:
        """Writes a file; its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.listed[name] = {"bytes": len(content), "sha256": digest}
        return name

    def put_json(self, name: str, value: Any) -> str:
        """Writes JSON, gzipped: whether a server packs what it sends is its own affair."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        return self.put(name, gzip.compress(text.encode(), mtime=0))


class WeightFiles:
    """Bytes that buffers are filled with, in files of bounded size; what is the same lies once."""

    def __init__(self, files: SiteFiles) -> None:
        """Starts without any."""
        self._files = files
        self._names: list[str] = []
        self._content = bytearray()
        self._places: dict[bytes, list[list[int]]] = {}

    def put(self, data: npt.NDArray[np.uint8]) -> list[list[int]]:
        """Adds bytes.

        Returns:
            Where they are, ``[file, first byte, bytes]``, in their order.
        """
        key = hashlib.sha256(data.tobytes()).digest()
        if key not in self._places:
            self._places[key] = self._added(data)
        return self._places[key]

    def end(self) -> list[str]:
        """Writes what is left; the names of all files."""
        self._write()
        return self._names

    def _added(self, data: npt.NDArray[np.uint8]) -> list[list[int]]:
        places, begin = [], 0
        while begin < data.size:
            if len(self._content) >= FILE_BYTES:
                self._write()
            piece = data[begin : begin + FILE_BYTES - len(self._content)]
            places.append([len(self._names), len(self._content), piece.size])
            self._content += piece.tobytes()
            self._content += bytes(-len(self._content) % _ALIGNMENT)
            begin += piece.size
        return places

    def _write(self) -> None:
        if self._content:
            name = f"weights/{len(self._names):03d}.bin"
            self._names.append(self._files.put(name, bytes(self._content)))
            self._content = bytearray()
