"""A GGUF file in place of a Hugging Face folder: its weights, config and tokenizer files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.cache_folder import cache_path, folder_of_this_process, is_own, make_cache_folder
from qlora_wgpu.checkpoint import gguf_file, gguf_tokenizer
from qlora_wgpu.checkpoint.atomic import atomic_folder, remove
from qlora_wgpu.checkpoint.gguf_file import FLOATS, QUANTIZED, ElementType, GGUFFile
from qlora_wgpu.checkpoint.manifest import WeightFingerprint, identity, state_of
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import WEIGHTS
from qlora_wgpu.checkpoint.stored_weight import IN_TURNS, FloatArray, StoredWeight
from qlora_wgpu.checkpoint.tokenizer_files import CONFIG, GENERATION, WITHOUT_TOKENIZER
from qlora_wgpu.errors import CheckpointError, TokenizerError
from qlora_wgpu.families.family import built_in_family
from qlora_wgpu.files import file_bytes
from qlora_wgpu.gguf.architecture import Keys
from qlora_wgpu.gguf.architectures import find_architecture
from qlora_wgpu.gguf.config import read_config
from qlora_wgpu.gguf.placements import TensorMapping, tensor_map
from qlora_wgpu.limits import MODEL_JSON_BYTES
from qlora_wgpu.mapped_files import release_pages
from qlora_wgpu.quant import GGML_FORMATS, QuantizedWeight, repack_ggml
from qlora_wgpu.weight_format import WeightFormat

# ---- config.json and the tokenizer ---------------------------------------------------------------

_KEPT = 8  # folders of some ten megabytes


def text_folder(file: GGUFFile, config: dict[str, Any]) -> Path:
    """A folder with config.json, tokenizer.json and the files next to them.

    It is cached for each header. If the vocabulary is not supported, the folder has the reason
    in place of a tokenizer, and is not cached, since the reason names the file.
    """
    folder = cache_path("gguf", f"{file.header_digest[:32]}-{_code_digest()}")
    if is_own(folder):
        with suppress(OSError):
            folder.touch()  # marks it as recently used
        return folder
    contents = _contents(file, config)
    if WITHOUT_TOKENIZER in contents:
        return _temporary_folder(contents)
    try:
        make_cache_folder(folder.parent)
        _evict(folder.parent)
        with atomic_folder(folder) as unfinished:
            _write(unfinished, contents)
        return folder
    except (OSError, CheckpointError):
        return _temporary_folder(contents)


def _temporary_folder(contents: dict[str, str]) -> Path:
    folder = folder_of_this_process("qlora-wgpu-gguf-")
    _write(folder, contents)
    return folder


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """A hash of the code that writes these files, since other versions may write others."""
    digest = hashlib.sha256()
    readers = (gguf_file.__file__, gguf_tokenizer.__file__)
    for path in sorted([*Path(__file__).parent.glob("*.py"), *map(Path, readers)]):
        digest.update(file_bytes(path, MODEL_JSON_BYTES))
    return digest.hexdigest()[:16]


def _contents(file: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    contents = {"config.json": _json(config)}
    try:
        files = gguf_tokenizer.tokenizer_files(file.metadata, file.path)
    except TokenizerError as err:
        return {**contents, WITHOUT_TOKENIZER: str(err)}
    contents["tokenizer.json"] = json.dumps(files.tokenizer, ensure_ascii=False)
    contents[CONFIG] = _json(files.config)
    if files.generation:
        contents[GENERATION] = _json(files.generation)
    return contents


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")


def _evict(cache: Path) -> None:
    with suppress(OSError, CheckpointError):
        folders = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime)
        for folder in folders[: -_KEPT + 1]:
            remove(folder)


# ---- weights -------------------------------------------------------------------------------------

_AT_ONCE = 1 << 22  # elements that are dequantized at a time
_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
_Bytes = npt.NDArray[np.uint8]


class GGUFWeight(StoredWeight):
    """A weight by Hugging Face's name, wherever a GGUF file has it."""

    def __init__(self, folder: GGUFFolder, name: str, placement: TensorMapping) -> None:
        self.name, self.placement = name, placement
        self._folder = folder

    @property
    def path(self) -> Path:
        """The model's file, or the first of its parts."""
        return self._folder.path

    @property
    def shape(self) -> tuple[int, ...]:
        """As in ``StoredWeight``."""
        return self.placement.shape

    @cached_property
    def type(self) -> ElementType:
        """What it is stored as; float32 if it is computed from several tensors of floats."""
        kinds = [self._folder.kind(leaf) for leaf in self.placement.leaves]
        packed = [kind for kind in kinds if not kind.is_float]
        return packed[0] if packed else FLOATS[0] if self.placement.change else kinds[0]

    @property
    def dtype(self) -> str:
        """The type of its floats; BF16 of quantized ones."""
        return self.type.name if self.type.is_float else "BF16"

    @property
    def stored_dtype(self) -> str:
        """llama.cpp's name of its type, such as "Q4_K"."""
        return self.type.name

    @property
    def is_quantized(self) -> bool:
        """As in ``StoredWeight``."""
        return self.type.number in QUANTIZED

    @property
    def format(self) -> WeightFormat | None:
        """As in ``StoredWeight``; the order of rows does not matter."""
        placement, stored = self.placement, GGML_FORMATS.get(self.type.name)
        columns = placement.columns
        is_whole = columns is None or columns.width % self.type.block == 0
        is_matrix = len(placement.shape) == 2 and placement.change is None and is_whole
        return stored.form if stored is not None and is_matrix else None

    def quantized(self) -> QuantizedWeight | None:
        """The blocks of a matrix, repacked; None without a ``format``."""
        if self.format is None:
            return None
        rows = np.ascontiguousarray(self.rows()).reshape(-1)
        shape = self.shape[0], self.shape[1]
        return repack_ggml(self.type.name, rows, shape, f"{self.path}: {self.name}")

    def raw(self) -> npt.NDArray[Any]:
        """The floats as stored; bfloat16 as uint16."""
        is_computed = bool(self.placement.offset) or self.placement.change is not None
        if is_computed and self.type.name == "F32":
            return self._float32()
        if self.type.name not in _NUMPY or is_computed:
            raise CheckpointError(f"{self.path}: {self.name} is not stored as floats")
        rows = np.ascontiguousarray(self.rows())
        return rows.view(_NUMPY[self.type.name]).reshape(self.shape)

    def read(self) -> FloatArray:
        """As float32, dequantized as llama.cpp does."""
        return self._finite(self._float32())

    def rows(self) -> _Bytes:
        """(rows, bytes of a row) in Hugging Face's order; a view of the file if that has it too."""
        self._folder.about_to_read(self.name)
        placement = self.placement
        rows = _joined([self._folder.rows_of(leaf) for leaf in placement.leaves])
        rows = rows if placement.order is None else rows[placement.order]
        if placement.columns is None:
            return rows
        width = placement.columns.width // self.type.block * self.type.nbytes
        return placement.columns.of(rows, width)

    def _float32(self) -> FloatArray:
        placement = self.placement
        self._folder.about_to_read(self.name)
        if placement.change is None:
            return self._floats(placement)
        sources = [self._floats(source) for source in placement.leaves]
        with np.errstate(all="ignore"):  # as below
            array = placement.change.make(sources)
        return np.ascontiguousarray(array, np.float32).reshape(placement.shape)

    def _floats(self, placement: TensorMapping) -> FloatArray:
        parts = []
        for leaf in placement.leaves:
            kind = self._folder.kind(leaf)
            if kind.number not in FLOATS and kind.number not in QUANTIZED:
                raise CheckpointError(
                    f"{self.path}: {leaf.stored} is stored as {kind.name}, which is not supported: "
                    "use another quantization of the model"
                )
            parts.append((self._folder.rows_of(leaf), kind))
        order, first = placement.order, 0
        columns = parts[0][0].shape[1] // parts[0][1].nbytes * parts[0][1].block
        result = np.empty((sum(len(rows) for rows, _ in parts), columns), np.float32)
        step = max(_AT_ONCE // columns, 1)
        with np.errstate(all="ignore"):  # ``read`` checks for values that are not finite
            for rows, kind in parts:
                for begin in range(0, len(rows), step):
                    some = rows[begin : begin + step]
                    result[first : first + len(some)] = to_float32(some, kind)
                    first += len(some)
            if order is not None:
                result = result[order]
            if placement.columns is not None:
                result = placement.columns.of(result, placement.columns.width)
            if placement.offset:
                result -= np.float32(placement.offset)
        return result.reshape(placement.shape)


# ---- the folder ----------------------------------------------------------------------------------


class GGUFFolder(ModelFolder):
    """An opened GGUF file: its header is read and checked, weights are read on demand.

    Attributes:
        path: The file, or the first of a split model's parts.
        config: What config.json would contain.
        file: The open file.
        placements: Where each tensor is, by Hugging Face's names.
        on_read: Called with the name of each tensor that is about to be read.
    """

    on_read: Callable[[str], None] | None = None
    _missing = "the file has no tensor for"

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        super().__init__(file.path, read_config(file), {})
        llama_cpp = find_architecture(Keys(file.metadata, file.path))
        family = built_in_family(self.config["model_type"])
        assert family is not None
        architecture = family.read(self.config)
        self.placements = tensor_map(file, llama_cpp, architecture, self.config)
        self._read_last: str | None = None

    @cached_property
    def text_folder(self) -> Path:
        """The folder with config.json and the tokenizer's files, from the file's header."""
        return text_folder(self.file, self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is stored quantized."""
        return any(self[name].is_quantized for name in self.placements)

    @property
    def splits_experts(self) -> bool:
        """Whether experts are separate tensors here, which Hugging Face's files stack."""
        return self.config.get("model_type") in IN_TURNS

    def names(self) -> list[str]:
        """All tensors, by Hugging Face's names."""
        return list(self.placements)

    def files(self) -> dict[str, list[str]]:
        """All tensors, in one file: the layout of a folder that is written from this one."""
        return {WEIGHTS: self.names()}

    def find(self, name: str) -> GGUFWeight | None:
        """A weight by its name."""
        placement = self.placements.get(name)
        return None if placement is None else GGUFWeight(self, name, placement)

    def start_fingerprint(self) -> None:
        """Hashes weights while they are read, so that ``fingerprint`` is cheap."""
        if self._fingerprint is None:
            self._fingerprint = WeightFingerprint(dict.fromkeys(self.names(), self))

    @cached_property
    def identity(self) -> str | None:
        """``ModelFolder.identity`` over all parts and their headers."""
        about = [self.file.header_digest, *map(state_of, self.file.paths)]
        return identity([self], json.dumps([self.config, about], sort_keys=True))

    # -- as a HashedFile -------------------------------------------------------------------------

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, such as "F16" or "Q4_K"."""
        return self[name].stored_dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self.placements[name].shape

    def stored_bytes(self, name: str) -> _Bytes:
        """A tensor's bytes as a view of the file, its rows in the file's order."""
        return _joined([self.rows_of(p).reshape(-1) for p in self.placements[name].leaves])

    # -- for GGUFWeight --------------------------------------------------------------------------

    def about_to_read(self, name: str) -> None:
        """Releases the weight that was read before, so that only one is in memory."""
        if self._read_last is not None:
            for leaf in self.placements[self._read_last].leaves:
                release_pages(self.file.tensor(leaf.stored).data)
        self._read_last = name
        if self.on_read is not None:
            self.on_read(name)

    def kind(self, placement: TensorMapping) -> ElementType:
        """The element type of a mapping's tensor."""
        return self.file.tensor(placement.stored).place.type

    def rows_of(self, placement: TensorMapping) -> _Bytes:
        """(rows, bytes of a row) as stored; the elements of a reordered bias are its rows."""
        stored = self.file.tensor(placement.stored)
        if placement.order is not None and len(placement.shape) == 1:
            return stored.data.reshape(len(stored.data) // self.kind(placement).nbytes, -1)
        count = math.prod(placement.shape[:-1])
        return stored.rows[placement.first_row : placement.first_row + count]


def _joined(parts: list[_Bytes]) -> _Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def to_float32(rows: _Bytes, kind: ElementType) -> npt.NDArray[np.float32]:
    """(rows, bytes of a row) as float32 (rows, columns)."""
    rows = np.ascontiguousarray(rows)
    if kind.name == "BF16":
        return from_bfloat16(rows.view("<u2"))
    if kind.is_float:
        return rows.view(_NUMPY[kind.name]).astype(np.float32)
    import gguf  # slow to import

    floats: npt.NDArray[np.float32] = gguf.quants.dequantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return floats
