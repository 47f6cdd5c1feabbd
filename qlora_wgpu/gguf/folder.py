"""A GGUF file in the place of a Hugging Face folder: its weights, and the files of its text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.cache_folder import cache_path, folder_of_this_process, is_own, make_cache_folder
from qlora_wgpu.checkpoint.atomic import atomic_folder, remove
from qlora_wgpu.checkpoint.expert_stacks import IN_TURNS
from qlora_wgpu.checkpoint.gguf import tokenizer
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.header import FLOATS, QUANTIZED, ElementType
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import WEIGHTS, nearest
from qlora_wgpu.checkpoint.tokenizer_files import CONFIG, GENERATION, WITHOUT_TOKENIZER
from qlora_wgpu.checkpoint.weight_fingerprint import WeightFingerprint, identity, state_of
from qlora_wgpu.errors import CheckpointError, TokenizerError
from qlora_wgpu.families.family import built_in_family
from qlora_wgpu.files import file_bytes
from qlora_wgpu.gguf.architectures import find_architecture
from qlora_wgpu.gguf.config import read_config
from qlora_wgpu.gguf.keys import Keys
from qlora_wgpu.gguf.placements import Placement, placements
from qlora_wgpu.limits import MODEL_JSON_BYTES
from qlora_wgpu.quant import GGML_FORMATS, QuantizedWeight, repack_ggml
from qlora_wgpu.weight_format import WeightFormat

# ---- weights -------------------------------------------------------------------------------------

_AT_ONCE = 1 << 22  # elements that become floats at once
_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
_Bytes = npt.NDArray[np.uint8]


class GGUFWeights:
    """What ``SafetensorsFile`` is for a safetensors file.

    Attributes:
        path: The file, or the first of its parts.
        on_read: Called with the name of each tensor that is about to be read.
    """

    on_read: Callable[[str], None] | None = None

    def __init__(self, file: GGUFFile, placements: Mapping[str, Placement]) -> None:
        """Takes an open file."""
        self.path: Path = file.path
        self._file = file
        self._placements = placements
        self._read_last: str | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._placements

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._placements)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions, whatever it is stored as."""
        return self._placements[name].shape

    def type(self, name: str) -> ElementType:
        """What a tensor is stored as; of one that is made of several floats' float32."""
        placement = self._placements[name]
        kinds = [self._kind(leaf) for leaf in placement.leaves]
        packed = [kind for kind in kinds if not kind.is_float]
        return packed[0] if packed else FLOATS[0] if placement.change else kinds[0]

    def keeps_bits(self, name: str) -> bool:
        """Whether the file's bytes are a tensor's, in whatever order."""
        placement = self._placements[name]
        columns = placement.columns
        is_whole = columns is None or columns.width % self.type(name).block == 0
        return placement.change is None and is_whole

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, for example "Q4_K"."""
        return self.type(name).name

    def stored_bytes(self, name: str) -> _Bytes:
        """A tensor's bytes as a view of the file, its rows in the file's order."""
        stored = [self._rows_of(leaf).reshape(-1) for leaf in self._placements[name].leaves]
        return stored[0] if len(stored) == 1 else np.concatenate(stored)

    def rows(self, name: str) -> _Bytes:
        """(rows, bytes of a row): a tensor's bytes, its rows in Hugging Face's order.

        A view of the file where that is the file's order, too.
        """
        self._tell(name)
        placement = self._placements[name]
        stored = [self._rows_of(leaf) for leaf in placement.leaves]
        rows, order = _joined(stored), placement.order
        rows = rows if order is None else rows[order]
        if placement.columns is None:
            return rows
        kind, width = self.type(name), placement.columns.width
        return placement.columns.of(rows, width // kind.block * kind.nbytes)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor of floating-point numbers as stored, bfloat16 as uint16."""
        kind, placement = self.type(name), self._placements[name]
        is_made = bool(placement.offset) or placement.change is not None
        if is_made and kind.name == "F32":
            return self.float32(name)
        if kind.name not in _NUMPY or is_made:
            raise CheckpointError(f"{self.path}: {name} is not stored as floats")
        rows = np.ascontiguousarray(self.rows(name))
        return rows.view(_NUMPY[kind.name]).reshape(self.shape(name))

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 numbers, quantized ones as llama.cpp reads them."""
        placement = self._placements[name]
        self._tell(name)
        if placement.change is None:
            return self._floats(placement)
        sources = [self._floats(source) for source in placement.leaves]
        with np.errstate(all="ignore"):  # as below
            made = placement.change.make(sources)
        return np.ascontiguousarray(made, np.float32).reshape(placement.shape)

    def _floats(self, placement: Placement) -> npt.NDArray[np.float32]:
        parts = []
        for leaf in placement.leaves:
            kind = self._kind(leaf)
            if kind.number not in FLOATS and kind.number not in QUANTIZED:
                raise CheckpointError(
                    f"{self.path}: {leaf.stored} is stored as {kind.name}, which is not read as "
                    "weights: take the model in another quantization"
                )
            parts.append((self._rows_of(leaf), kind))
        order, first = placement.order, 0
        columns = parts[0][0].shape[1] // parts[0][1].nbytes * parts[0][1].block
        result = np.empty((sum(len(rows) for rows, _ in parts), columns), np.float32)
        with np.errstate(all="ignore"):  # whoever reads looks for what is not finite
            for rows, kind in parts:
                for some in _cut(rows, columns):
                    result[first : first + len(some)] = to_float32(some, kind)
                    first += len(some)
            if order is not None:
                result = result[order]
            if placement.columns is not None:
                result = placement.columns.of(result, placement.columns.width)
            if placement.offset:
                result -= np.float32(placement.offset)
        return result.reshape(placement.shape)

    def _tell(self, name: str) -> None:
        if self._read_last is not None:  # one at a time in memory
            for leaf in self._placements[self._read_last].leaves:
                self._file.tensor(leaf.stored).release()
        self._read_last = name
        if self.on_read is not None:
            self.on_read(name)

    def _kind(self, placement: Placement) -> ElementType:
        return self._file.tensor(placement.stored).place.type

    def _rows_of(self, placement: Placement) -> _Bytes:
        stored = self._file.tensor(placement.stored)
        if placement.order is not None and len(placement.shape) == 1:
            # A bias, whose order is of elements.
            return stored.data.reshape(len(stored.data) // self._kind(placement).nbytes, -1)
        count = math.prod(placement.shape[:-1])
        return stored.rows[placement.first_row : placement.first_row + count]


def _joined(parts: list[_Bytes]) -> _Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cut(rows: _Bytes, columns: int) -> Iterator[_Bytes]:
    """Some rows at a time."""
    step = max(_AT_ONCE // columns, 1)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def to_float32(rows: _Bytes, kind: ElementType) -> npt.NDArray[np.float32]:
    """Rows of a type's blocks as float32 numbers (rows, columns)."""
    rows = np.ascontiguousarray(rows)
    if kind.name == "BF16":
        return from_bfloat16(rows.view("<u2"))
    if kind.is_float:
        return rows.view(_NUMPY[kind.name]).astype(np.float32)
    import gguf  # takes its time, for those alone who need it

    floats: npt.NDArray[np.float32] = gguf.quants.dequantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return floats


# ---- the files of its text -----------------------------------------------------------------------

_KEPT = 8  # folders of some ten megabytes


def text_folder(file: GGUFFile, config: dict[str, Any]) -> Path:
    """A folder with config.json, tokenizer.json and what else is beside weights.

    It is made once for each header and kept in the cache. Where a file's vocabulary is not read, it
    has the reason instead of a tokenizer, which names the file and is kept for nobody else.
    """
    folder = cache_path("gguf", f"{file.header_digest[:32]}-{_makers_digest()}")
    if is_own(folder):
        with suppress(OSError):
            folder.touch()  # used just now
        return folder
    contents = _contents(file, config)
    if WITHOUT_TOKENIZER in contents:
        return _temporary_folder(contents)
    try:
        make_cache_folder(folder.parent)
        _forget_oldest(folder.parent)
        with atomic_folder(folder) as unfinished:
            _write(unfinished, contents)
        return folder
    except (OSError, CheckpointError):
        return _temporary_folder(contents)


def _temporary_folder(contents: dict[str, str]) -> Path:
    """Where the cache keeps nothing."""
    made = folder_of_this_process("qlora-wgpu-gguf-")
    _write(made, contents)
    return made


@lru_cache(maxsize=1)
def _makers_digest() -> str:
    """A hash of the code that makes these files, which another version may make otherwise."""
    digest = hashlib.sha256()
    here, files = Path(__file__).parent, Path(tokenizer.__file__).parent
    for path in sorted([*here.glob("*.py"), *files.glob("*.py")]):
        digest.update(file_bytes(path, MODEL_JSON_BYTES))
    return digest.hexdigest()[:16]


def _contents(file: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    contents = {"config.json": _json(config)}
    try:
        made = tokenizer.tokenizer_files(file.metadata, file.path)
    except TokenizerError as err:
        return {**contents, WITHOUT_TOKENIZER: str(err)}
    contents["tokenizer.json"] = json.dumps(made.tokenizer, ensure_ascii=False)
    contents[CONFIG] = _json(made.config)
    if made.generation:
        contents[GENERATION] = _json(made.generation)
    return contents


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")


def _forget_oldest(cache: Path) -> None:
    """Makes room: those that were used last are kept."""
    with suppress(OSError, CheckpointError):
        folders = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime)
        for folder in folders[: -_KEPT + 1]:
            remove(folder)


# ---- the folder ----------------------------------------------------------------------------------


class GGUFFolder(ModelFolder):
    """An opened GGUF file: its header is read and checked, a weight is read when asked for.

    Attributes:
        path: The file, or the first of a split model's.
        config: What config.json would say.
        file: The open file.
        placements: Where each tensor lies in it, by Hugging Face's names.
    """

    tells_shapes = True

    def __init__(self, file: GGUFFile) -> None:
        """Takes an open file."""
        config = read_config(file)
        super().__init__(file.path, config, {})
        self.file = file
        llama_cpp = find_architecture(Keys(file.metadata, file.path))
        family = built_in_family(config["model_type"])
        assert family is not None
        self.placements = placements(file, llama_cpp, family.read(config), config)
        self._weights = GGUFWeights(file, self.placements)

    @classmethod
    def of_path(cls, path: Path) -> GGUFFolder:
        """Opens a file; any part of a split model names all; errors as for the constructor."""
        return cls(GGUFFile(path))

    @cached_property
    def text_folder(self) -> Path:
        """The folder with config.json and the tokenizer's files, made of the file's header."""
        return text_folder(self.file, self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is stored quantized."""
        return any(self._is_quantized(name) for name in self._weights.names())

    @property
    def parts_stacks(self) -> bool:
        """Whether experts are by themselves here, which Hugging Face's files hold together."""
        return self.config.get("model_type") in IN_TURNS

    def names(self) -> list[str]:
        """All tensors, by Hugging Face's names."""
        return self._weights.names()

    def files(self) -> dict[str, list[str]]:
        """All tensors in one file, as a folder that is made of this one has them."""
        return {WEIGHTS: self.names()}

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._weights

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, such as "F16" or "Q4_K"."""
        return self._known(name).dtype(name)

    def float_dtype(self, name: str) -> str:
        """The type of floats that a tensor becomes."""
        return self.dtype(name) if self._known(name).type(name).is_float else "BF16"

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions, whatever it is stored as."""
        return self._known(name).shape(name)

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """``shape``."""
        return self.shape(name)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor of floats as stored; bfloat16 as uint16."""
        return self._known(name).raw(name)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, quantized ones as llama.cpp reads them."""
        return self._checked(name, self._known(name).float32(name), self.path)

    def dequantized(self, name: str) -> npt.NDArray[np.float32]:
        """``float32``, which takes all."""
        return self.float32(name)

    def quantized(self, name: str, *, mapped: bool = False) -> QuantizedWeight | None:
        """A matrix as it is stored; None of floats and of types that no kernel reads."""
        weights = self._known(name)
        shape = weights.shape(name)
        if self.weight_format(name) is None:
            return None
        rows = np.ascontiguousarray(weights.rows(name)).reshape(-1)
        where = f"{self.path}: {name}"
        return repack_ggml(weights.dtype(name), rows, (shape[0], shape[1]), where)

    def weight_format(self, name: str) -> WeightFormat | None:
        """The format of ``quantized(name)``, without reading it."""
        weights = self._known(name)
        stored = GGML_FORMATS.get(weights.dtype(name))
        is_matrix = len(weights.shape(name)) == 2 and weights.keeps_bits(name)
        return stored.form if stored is not None and is_matrix else None

    def holds_quantized(self, name: str) -> bool:
        """Whether a weight is there and quantized."""
        return self.has(name) and self._is_quantized(name)

    def must_requantize(self, name: str) -> bool:
        """Whether a weight is of a type that no kernel has; ``float32`` gives it."""
        return self.holds_quantized(name) and self.weight_format(name) is None

    def weight_of(self, tensor: str) -> str:
        """The tensor's own name."""
        return tensor

    def is_companion(self, tensor: str) -> bool:
        """No: blocks hold their scales."""
        return False

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read from now on, so that ``fingerprint`` costs little."""
        if self._fingerprint is None:
            self._fingerprint = WeightFingerprint(dict.fromkeys(self.names(), self._weights))

    @cached_property
    def identity(self) -> str | None:
        """``ModelFolder.identity``, of all parts and their headers."""
        about = [self.file.header_digest, *map(state_of, self.file.paths)]
        return identity([self._weights], json.dumps([self.config, about], sort_keys=True))

    def _is_quantized(self, name: str) -> bool:
        return self._weights.type(name).number in QUANTIZED

    def _known(self, name: str) -> GGUFWeights:
        if name not in self._weights:
            raise CheckpointError(
                f"{self.path}: the file has no tensor for {name!r}{nearest(name, self.names())}"
            )
        return self._weights
