"""Bytes that go to a device's memory and come back, in pieces that keep host memory flat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.sizes import TEXTURE_ROW, TEXTURE_WIDTH
from qlora_wgpu.mapped_files import let_go, require_whole

UPLOAD_CHUNK = 16 << 20  # unsubmitted writes pile up in host memory


class Transfers:
    """The part of a device that moves bytes.

    Attributes:
        raw: WebGPU's device.
    """

    raw: Any
    _unsubmitted = 0  # bytes that were written since work was handed to the driver
    _under_way = 0  # bytes that the driver may still keep in host memory

    def driver_call(self, what: str) -> AbstractContextManager[None]:
        """What every call into the driver is made in that may wait for it or fail.

        Args:
            what: What is done, for messages: ``"reading a result"``.
        """
        raise NotImplementedError

    def submit(self, *commands: Any) -> None:
        """Hands finished command buffers to the driver; does not wait.

        Raises:
            DeviceError: If the driver refuses them, or the GPU was lost.
        """
        self._unsubmitted = 0
        with self.driver_call("submitting work"):
            self.raw.queue.submit(list(commands))

    def write(
        self,
        buffer: Any,
        data: npt.NDArray[Any] | bytes,
        offset: int = 0,
        read: Callable[[npt.NDArray[Any]], None] = require_whole,
    ) -> None:
        """Copies host data into a buffer, in pieces so that host memory stays flat.

        A file's pages leave the process's memory behind each piece.

        Args:
            buffer: The buffer.
            data: What is copied.
            offset: The first byte of the buffer that it goes to.
            read: Called with each piece before it is copied, which may be a file's.

        Raises:
            WeightFileError: If the file that it is in was cut.
        """
        if isinstance(data, np.ndarray):
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        else:
            raw = np.frombuffer(data, np.uint8)
        if raw.size % 4:
            raw = np.pad(raw, (0, -raw.size % 4))
        for start in range(0, raw.size, UPLOAD_CHUNK):
            piece = raw[start : start + UPLOAD_CHUNK]
            read(piece)
            with self.driver_call("uploading data"):
                self.raw.queue.write_buffer(buffer, offset + start, piece)
            let_go(piece)
            self._unsubmitted += piece.size
            self._under_way += piece.size
            if self._unsubmitted >= UPLOAD_CHUNK:
                self.submit()

    def fill(self, buffer: Any, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Writes what a new buffer, or a part of one, holds, and waits where much is on its way.

        The driver's copies would else lie between buffers that stay, and leave holes.
        """
        self.write(buffer, data, offset)
        if self._under_way >= UPLOAD_CHUNK:
            self.read(buffer, 4)

    def read(self, buffer: Any, nbytes: int, offset: int = 0) -> memoryview:
        """Waits for all submitted work and copies bytes back."""
        padded = nbytes + -nbytes % 4
        with self.driver_call("reading a result"):
            data: memoryview = self.raw.queue.read_buffer(buffer, offset, padded)
        self._under_way = 0
        return data[:nbytes]

    def write_texture(self, texture: Any, data: npt.NDArray[Any]) -> None:
        """Fills a texture from its first texel on, in pieces so that host memory stays flat."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        rows = UPLOAD_CHUNK // TEXTURE_ROW
        for row in range(0, -(-flat.size // TEXTURE_ROW), rows):
            piece = flat[row * TEXTURE_ROW : (row + rows) * TEXTURE_ROW]
            height = -(-piece.size // TEXTURE_ROW)
            require_whole(piece)
            with self.driver_call("uploading data"):
                self.raw.queue.write_texture(
                    {"texture": texture, "origin": (0, row, 0)},
                    np.pad(piece, (0, height * TEXTURE_ROW - piece.size)),
                    {"bytes_per_row": TEXTURE_ROW, "rows_per_image": height},
                    (TEXTURE_WIDTH, height, 1),
                )
            let_go(piece)
            self._under_way += piece.size
            self.submit()
            if self._under_way >= UPLOAD_CHUNK:
                self.read_texture(texture, 4)

    def read_texture(self, texture: Any, nbytes: int, offset: int = 0) -> memoryview:
        """Waits for all submitted work and copies a texture's bytes back."""
        first, last = offset // TEXTURE_ROW, -(-(offset + nbytes) // TEXTURE_ROW)
        with self.driver_call("reading a result"):
            data: memoryview = self.raw.queue.read_texture(
                {"texture": texture, "origin": (0, first, 0)},
                {"bytes_per_row": TEXTURE_ROW, "rows_per_image": last - first},
                (TEXTURE_WIDTH, last - first, 1),
            )
        self._under_way = 0
        start = offset - first * TEXTURE_ROW
        return data.cast("B")[start : start + nbytes]
