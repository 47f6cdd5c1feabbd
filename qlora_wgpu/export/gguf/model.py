"""A base with an adapter in it as one GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint.gguf.architectures import ARCHITECTURES as READ
from qlora_wgpu.checkpoint.gguf.folder import GGUFFolder
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import LlamaCpp, find_llama_cpp, model_type_of
from qlora_wgpu.export.gguf.carried import carried_keys, carried_tensors
from qlora_wgpu.export.gguf.element_types import BF16, F16, F32, FILE_TYPES, FileType
from qlora_wgpu.export.gguf.file import check_room, write_file
from qlora_wgpu.export.gguf.keys import model_keys
from qlora_wgpu.export.gguf.rope import rope_tensors
from qlora_wgpu.export.gguf.scalars import scalar_keys
from qlora_wgpu.export.gguf.tensors import FileTensor, model_tensors, refuse_untied
from qlora_wgpu.export.merged_weights import MergedWeights
from qlora_wgpu.families.parts.decoder import Decoder

_QUANTIZATION_VERSION = 2  # of ggml's blocks


@dataclass(frozen=True)
class GGUFModel:
    """A file that is to be written.

    Attributes:
        architecture: llama.cpp's name of it.
        keys: Its metadata.
        tensors: Its tensors.
        file_type: What most matrices are stored as.
        notes: What llama.cpp does otherwise, for the user to know.
    """

    architecture: str
    keys: Mapping[str, Any]
    tensors: tuple[FileTensor, ...]
    file_type: FileType
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def check_room(self, path: Path) -> None:
        """Makes sure that the disk has room, before anything is measured or written.

        Raises:
            CheckpointError: If it has none.
        """
        check_room(path, self.tensors)

    def write(self, path: Path, progress: Callable[[str], None]) -> None:
        """Writes it; not atomic.

        Args:
            path: The file.
            progress: Called with each tensor's name before it is written.

        Raises:
            CheckpointError: If it cannot be written, or a weight is missing or damaged.
        """
        write_file(path, self.architecture, self.keys, self.tensors, progress)


def gguf_model(
    merged: MergedWeights,
    file_type: FileType | None,
    vocabulary: Callable[[int], Mapping[str, Any]],
) -> GGUFModel:
    """What a file of a merged model holds; no weight is read yet.

    Of a base that is a GGUF file itself, keys, vocabulary and all tensors that the adapter does not
    change are carried over as they are.

    Args:
        merged: The weights.
        file_type: What matrices are stored as; by default the base's own type of 16 or 32 bits.
        vocabulary: The keys of the tokenizer, for so many tokens, and the model's name.

    Raises:
        UnsupportedModelError: If llama.cpp does not have the model.
        TokenizerError: If it does not have its tokenizer.
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
        keys = carried_keys(folder) | own
        tensors = carried_tensors(merged, folder, file_type.kind)
        return GGUFModel(folder.file.metadata["general.architecture"], keys, tensors, file_type)
    model_type, decoder = model_type_of(folder.config), merged.architecture.config
    llama_cpp = _llama_cpp(merged)
    import gguf  # takes its time, for those alone who need it

    architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[llama_cpp.label]]
    if not isinstance(decoder, Decoder) or architecture not in READ:
        raise UnsupportedModelError(
            f"models of type {model_type!r} are not exported to GGUF as a whole, since they are "
            "not read back: take --adapter-only, or qlora-wgpu merge and llama.cpp's converter"
        )
    told = model_keys(model_type, folder.config, decoder, llama_cpp)
    keys = {
        "general.type": "model",
        **own,
        **{f"{architecture}.{key}": value for key, value in told.values.items()},
        **scalar_keys(merged),
        f"{architecture}.vocab_size": merged.architecture.vocab_size,
        **vocabulary(merged.architecture.vocab_size),
    }
    tensors = tuple(model_tensors(merged, llama_cpp, file_type.kind, rope_tensors(told)))
    notes = (*told.notes, *_notes(tensors, file_type))
    return GGUFModel(architecture, keys, tensors, file_type, notes)


def _llama_cpp(merged: MergedWeights) -> LlamaCpp:
    has_experts = bool(merged.architecture.experts)
    return find_llama_cpp(model_type_of(merged.folder.config), "models", has_experts=has_experts)


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
    kind = kinds.get(folder.float_dtype(name), BF16)
    return FILE_TYPES[kind.name.lower()]
