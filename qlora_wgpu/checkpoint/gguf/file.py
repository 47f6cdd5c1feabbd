"""GGUF files, mapped into memory: one, or all parts of a model that was split."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.header import TYPES, Header, TensorPlace, read_header
from qlora_wgpu.checkpoint.safetensors_file import LFS_PREFIX, HeaderError, nearest
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.files import is_there, open_file
from qlora_wgpu.mapped_files import map_file

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as a file has it."""

    place: TensorPlace  # its type and shape
    data: npt.NDArray[np.uint8]  # its bytes, a view of the file, or made of the metadata

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """(rows, bytes of a row): blocks lie along rows."""
        return self.data.reshape(-1, self.place.type.row_bytes(self.place.shape[-1]))


class GGUFFile:
    """An open model; nothing but its header is read before it is asked for.

    Attributes:
        path: The file, or the first of its parts.
        paths: All parts.
        metadata: Values by key, as ``Header`` has them.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Opens a file and checks its header; of a split model any part names all."""
        paths = parts_of(Path(path))
        self.path, self.paths = paths[0], tuple(paths)
        parts = [_open(part) for part in paths]
        self.metadata = parts[0][0].metadata
        _check_parts(paths, [header for header, _ in parts])
        self._headers: list[npt.NDArray[np.uint8]] = []
        self._tensors: dict[str, StoredTensor] = {}
        self._made: dict[str, StoredTensor] = {}
        for part, (header, data) in zip(paths, parts, strict=True):
            self._headers.append(data[: header.nbytes])
            for name, place in header.tensors.items():
                if name in self._tensors:
                    raise CheckpointError(f"{part} holds {brief(name)}, as another part does")
                self._tensors[name] = StoredTensor(place, data[place.begin : place.end])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """All tensors, by the names that llama.cpp has for them."""
        return list(self._tensors)

    def tensor(self, name: str) -> StoredTensor:
        """A tensor by such a name."""
        found = self._tensors.get(name) or self._made.get(name)
        if found is None:
            raise CheckpointError(
                f"{self.path} has no tensor {brief(name)}{nearest(name, self.names())}"
            )
        return found

    def add_number(self, name: str, value: float) -> None:
        """Adds a number of the metadata as what ``tensor`` finds; ``names`` has it not."""
        data = np.array([value], "<f4").view(np.uint8)
        place = TensorPlace(TYPES[0], (1,), 0, data.nbytes)
        self._made[name] = StoredTensor(place, data)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A small tensor of floating-point numbers."""
        place = self.tensor(name).place
        if place.type.name != "F32":
            raise CheckpointError(f"{self.path}: {name} is stored as {place.type.name}, not as F32")
        return self.tensor(name).data.view("<f4").reshape(place.shape)

    @cached_property
    def header_digest(self) -> str:
        """A hash of all headers, which tell everything but the weights."""
        digest = hashlib.sha256()
        for header in self._headers:
            digest.update(header.data)
        return digest.hexdigest()


def parts_of(path: Path) -> list[Path]:
    """All files of a model, by the name of one: itself, or the parts of one that was split."""
    split = split_name(path.name)
    if split is None:
        return [path]
    base, count = split
    parts = [path.with_name(name) for name in part_names(base, count)]
    missing = [part.name for part in parts if not is_there(part)]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {missing[0]} ({len(missing)} of {count} parts are missing): "
            "download all of them"
        )
    return parts


def part_names(base: str, count: int) -> list[str]:
    """The names of a split model's files."""
    return [f"{base}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def split_name(name: str) -> tuple[str, int] | None:
    """What the names of a split model's parts begin with, and how many there are; None if none."""
    found = _PART.fullmatch(name)
    return None if found is None or int(found[3]) == 0 else (found[1], int(found[3]))


def _open(path: Path) -> tuple[Header, npt.NDArray[np.uint8]]:
    try:
        with open_file(path) as file:
            start = file.read(64)
            if start.startswith(LFS_PREFIX):
                raise HeaderError("is a Git LFS pointer, not the weights: run git lfs pull")
            if not start:
                raise HeaderError("is empty: download or copy it again")
            data = map_file(path, file)
            return read_header(data.data), data
    except HeaderError as err:
        raise CheckpointError(f"{path} {err}") from err
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from err


def _check_parts(paths: list[Path], headers: list[Header]) -> None:
    """Makes sure that each part is what its name says."""
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count, place = (header.metadata.get(f"split.{key}") for key in ("count", "no"))
        if len(paths) == 1 and count in (None, 0, 1):
            continue
        if count != len(paths) or place != number:
            raise CheckpointError(
                f"{path} says that it is part {brief(place)} of {brief(count)} parts, counted from "
                f"0, but its name says {number} of {len(paths)}: name the parts as llama.cpp's "
                "gguf-split did, NAME-00001-of-0000N.gguf"
            )
