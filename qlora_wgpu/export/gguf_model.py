"""A base with an adapter in it as one GGUF file, and what of a base's own file stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.file import StoredTensor
from qlora_wgpu.checkpoint.gguf.header import ElementType
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.export.folders import MARGIN, check_disk_space
from qlora_wgpu.export.gguf_tensors import (
    BF16,
    F16,
    F32,
    FILE_TYPES,
    FileTensor,
    FileType,
    as_bytes,
    model_tensors,
    refuse_untied,
    type_within,
)
from qlora_wgpu.export.merge import MergedWeights
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.gguf.architecture import GGUFArchitecture
from qlora_wgpu.gguf.architectures import architecture_of, model_type_of
from qlora_wgpu.gguf.config import model_keys, rope_tensors, scalar_keys
from qlora_wgpu.gguf.folder import GGUFFolder
from qlora_wgpu.gguf.layout import EMBEDDING, HEAD
from qlora_wgpu.gguf.placements import TensorMapping
from qlora_wgpu.mapped_files import let_go

# ---- a base's own file ---------------------------------------------------------------------------

# How a file was split, quantized and aligned is not so of the new one.
_LEFT_OUT = ("split.", "quantize.", "general.architecture", "general.alignment")
_Source = tuple[str, TensorMapping, int]  # a tensor, where it lies, and which of its parts


def passthrough_metadata(folder: GGUFFolder) -> dict[str, Any]:
    """A file's metadata, but for what tells of the file alone."""
    metadata = folder.file.metadata
    return {key: value for key, value in metadata.items() if not key.startswith(_LEFT_OUT)}


def carried_tensors(
    merged: MergedWeights, folder: GGUFFolder, wanted: ElementType
) -> tuple[FileTensor, ...]:
    """A file's tensors: bit for bit, but for those that the adapter changes.

    A head that was the embedding, and is no longer, comes after them.
    """
    parts: dict[str, list[_Source]] = {}
    for name, placement in folder.placements.items():
        for i, leaf in enumerate(placement.leaves):
            parts.setdefault(leaf.stored, []).append((name, placement, i))
    tensors = [
        _changed(merged, folder, stored, parts[stored], wanted)
        if any(merged.is_adapted(name) for name, _, _ in parts.get(stored, ()))
        else _kept(stored, folder.file.tensor(stored))
        for stored in folder.file.names()
    ]
    if merged.untied:
        tensors.append(_own_head(merged, folder, wanted))
    return tuple(tensors)


def _own_head(merged: MergedWeights, folder: GGUFFolder, wanted: ElementType) -> FileTensor:
    """The head of a model whose embedding and head were one, and are two with the adapter."""
    name = merged.stored_name(merged.architecture.head_name)
    shared = folder.file.tensor(folder.placements[merged.source_of(name)].stored)
    if not merged.is_adapted(name):
        return _kept(HEAD, shared)
    kind = type_within(wanted, shared.place.shape, is_head=True)
    return FileTensor(
        HEAD, shared.place.shape, kind, (lambda: as_bytes(merged.float32(name), kind, HEAD),)
    )


def _kept(name: str, tensor: StoredTensor) -> FileTensor:
    def read() -> Iterator[npt.NDArray[np.uint8]]:
        yield np.ascontiguousarray(tensor.data)
        let_go(tensor.data)

    return FileTensor(name, tensor.place.shape, tensor.place.type, (read,))


def _changed(
    merged: MergedWeights,
    folder: GGUFFolder,
    stored: str,
    sources: list[_Source],
    wanted: ElementType,
) -> FileTensor:
    shape = folder.file.tensor(stored).place.shape
    is_shared = stored == EMBEDDING and HEAD not in folder.file and not merged.untied
    kind = type_within(wanted, shape, is_head=stored == HEAD or is_shared)
    ordered = sorted(sources, key=lambda source: source[1].leaves[source[2]].first_row)

    def part(source: _Source) -> Callable[[], Iterator[npt.NDArray[np.uint8]]]:
        name, placement, i = source
        return lambda: as_bytes(placement.as_stored(merged.float32(name))[i], kind, stored)

    return FileTensor(stored, shape, kind, tuple(map(part, ordered)))


# ---- writing -------------------------------------------------------------------------------------

_ALIGNMENT = 32
_ARRAYS = {"u": "UINT", "i": "INT", "f": "FLOAT"}


def _pad(file: Any, size: int) -> None:
    file.write(bytes(-size % _ALIGNMENT))


def _add(writer: Any, key: str, value: Any) -> None:
    """Adds a value of the type that llama.cpp reads for it: whole numbers are uint32."""
    import gguf

    if isinstance(value, np.ndarray) and not value.size:
        return  # as gguf leaves out lists of nothing
    if isinstance(value, np.ndarray):
        width = 8 * value.dtype.itemsize
        name = "BOOL" if value.dtype.kind == "b" else f"{_ARRAYS[value.dtype.kind]}{width}"
        array, kind = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[name]
        writer.add_key_value(key, value.tolist(), array, sub_type=kind)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if value < 0:
            writer.add_int32(key, value)
        elif value < 1 << 32:
            writer.add_uint32(key, value)
        else:
            writer.add_uint64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# ---- a merged model ------------------------------------------------------------------------------

_QUANTIZATION_VERSION = 2  # of ggml's blocks


@dataclass(frozen=True)
class GGUFModel:
    """A file that is to be written."""

    architecture: str  # llama.cpp's name of it
    keys: Mapping[str, Any]  # its metadata
    tensors: tuple[FileTensor, ...]  # its tensors
    file_type: FileType  # what most matrices are stored as
    notes: tuple[str, ...] = ()  # what llama.cpp does otherwise, for the user to know

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def check_room(self, path: Path) -> None:
        """Makes sure that the disk has room, before anything is measured or written."""
        needed = sum(tensor.nbytes + _ALIGNMENT for tensor in self.tensors) + MARGIN
        advice = "name another place with --gguf, or a smaller --type"
        check_disk_space(path.parent, needed, "the file", advice)

    def write(self, path: Path, progress: Callable[[str], None]) -> None:
        """Writes it; not atomic."""
        import gguf  # takes its time, for those alone who need it

        self.check_room(path)
        writer = gguf.GGUFWriter(None, self.architecture)
        for key, value in self.keys.items():
            _add(writer, key, value)
        for tensor in self.tensors:
            kind = gguf.GGMLQuantizationType(tensor.kind.number)
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind
            )
        writer.write_header_to_file(path=path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with path.open("ab") as file:
            _pad(file, file.tell())
            for tensor in self.tensors:
                progress(tensor.name)
                begin = file.tell()
                for part in tensor.parts:
                    for raw in part():
                        file.write(raw.data)
                if file.tell() - begin != tensor.nbytes:
                    raise CheckpointError(
                        f"{tensor.name} became {file.tell() - begin} bytes, not {tensor.nbytes}"
                    )
                _pad(file, tensor.nbytes)


def gguf_model(
    merged: MergedWeights,
    file_type: FileType | None,
    vocabulary: Callable[[int], Mapping[str, Any]],
) -> GGUFModel:
    """What a file of a merged model holds; no weight is read yet.

    Of a base that is a GGUF file itself, keys, vocabulary and all tensors that the adapter does not
    change are carried over as they are. ``vocabulary`` gives the keys of the tokenizer for so many
    tokens, and the model's name.
    """
    file_type = file_type or own_type(merged)
    folder = merged.folder
    own = {"general.file_type": file_type.number}
    if not file_type.kind.is_float:
        own["general.quantization_version"] = _QUANTIZATION_VERSION
    if isinstance(folder, GGUFFolder):
        if merged.is_resized:
            raise UnsupportedModelError(
                f"{folder.path}: the adapter has added tokens, which a vocabulary that is carried "
                "over from a GGUF file does not take: export from the model's safetensors version"
            )
        if merged.untied:
            refuse_untied(merged, _llama_cpp(merged))
        keys = passthrough_metadata(folder) | own
        tensors = carried_tensors(merged, folder, file_type.kind)
        return GGUFModel(folder.file.metadata["general.architecture"], keys, tensors, file_type)
    model_type, decoder = model_type_of(folder.config), merged.architecture.config
    llama_cpp = _llama_cpp(merged)
    architecture = llama_cpp.name
    if not isinstance(decoder, Decoder):
        raise UnsupportedModelError(
            f"models of type {model_type!r} are not exported to GGUF as a whole, since they are "
            "not read back: take --adapter-only, or qlora-wgpu merge and llama.cpp's converter"
        )
    told = model_keys(model_type, folder.config, decoder, llama_cpp)
    keys = {
        "general.type": "model",
        **own,
        **{f"{architecture}.{key}": value for key, value in told.values.items()},
        **scalar_keys(merged, llama_cpp),
        f"{architecture}.vocab_size": merged.architecture.vocab_size,
        **vocabulary(merged.architecture.vocab_size),
    }
    tensors = tuple(model_tensors(merged, llama_cpp, file_type.kind, rope_tensors(told)))
    notes = (*told.notes, *_notes(tensors, file_type))
    return GGUFModel(architecture, keys, tensors, file_type, notes)


def _llama_cpp(merged: MergedWeights) -> GGUFArchitecture:
    has_experts = bool(merged.architecture.experts)
    return architecture_of(model_type_of(merged.folder.config), "models", has_experts=has_experts)


def _notes(tensors: Sequence[FileTensor], file_type: FileType) -> Iterator[str]:
    """Tells of matrices that cannot be cut into blocks."""
    kind = file_type.kind
    kept = [t.name for t in tensors if t.kind == F16 and t.shape[-1] % kind.block]
    if kept:
        yield (
            f"{len(kept)} matrices are kept in f16, such as {kept[0]}: their rows are no whole "
            f"blocks of {kind.block}"
        )


def own_type(merged: MergedWeights) -> FileType:
    """The base's own type of floats; bfloat16 of one that is stored quantized."""
    folder, linears = merged.folder, merged.architecture.every_linear
    name = merged.stored_name(f"{linears[0].name}.weight")
    kinds = {kind.name: kind for kind in (F32, F16, BF16)}
    kind = kinds.get(folder[name].dtype, BF16)
    return FILE_TYPES[kind.name.lower()]
