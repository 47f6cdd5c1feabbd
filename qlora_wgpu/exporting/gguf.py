"""A merged model, or an adapter alone, as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.atomic import atomic_file
from qlora_wgpu.checkpoint.gguf_file import ElementType, StoredTensor
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.exporting.folders import MARGIN, check_disk_space
from qlora_wgpu.exporting.gguf_tensors import (
    BF16,
    F16,
    F32,
    FILE_TYPES,
    FileTensor,
    FileType,
    as_bytes,
    model_tensors,
    refuse_untied,
    type_of_matrix,
)
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.exporting.scored import refuse_scored
from qlora_wgpu.families.family import ExpertSpec, find_family
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.gguf.architecture import GGUFArchitecture
from qlora_wgpu.gguf.architectures import architecture_for, model_type_of
from qlora_wgpu.gguf.config import model_keys, rope_tensors, scalar_keys
from qlora_wgpu.gguf.folder import GGUFFolder
from qlora_wgpu.gguf.layout import EMBEDDING, HEAD, Layout
from qlora_wgpu.gguf.placements import TensorMapping
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.compatibility import adapter_shapes, refuse_other_base
from qlora_wgpu.lora.peft_names import AdaptedLayer, adapted_layers
from qlora_wgpu.mapped_files import release_pages

# ---- a base that is a GGUF file ------------------------------------------------------------------

# Keys that do not apply to the new file.
_OMITTED = ("split.", "quantize.", "general.architecture", "general.alignment")
_Source = tuple[str, TensorMapping, int]  # a tensor, its place, and the index of its part


def passthrough_metadata(folder: GGUFFolder) -> dict[str, Any]:
    """A file's metadata without the keys that describe only the file."""
    metadata = folder.file.metadata
    return {key: value for key, value in metadata.items() if not key.startswith(_OMITTED)}


def passthrough_tensors(
    merged: MergedWeights, folder: GGUFFolder, target: ElementType
) -> tuple[FileTensor, ...]:
    """A file's tensors: bit-identical, except for those that the adapter changes.

    A head that becomes untied comes last.
    """
    parts: dict[str, list[_Source]] = {}
    for name, placement in folder.placements.items():
        for i, leaf in enumerate(placement.leaves):
            parts.setdefault(leaf.stored, []).append((name, placement, i))
    tensors = [
        _changed(merged, folder, stored, parts[stored], target)
        if any(merged.is_adapted(name) for name, _, _ in parts.get(stored, ()))
        else _kept(stored, folder.file.tensor(stored))
        for stored in folder.file.names()
    ]
    if merged.untied:
        tensors.append(_untied_head(merged, folder, target))
    return tuple(tensors)


def _untied_head(merged: MergedWeights, folder: GGUFFolder, target: ElementType) -> FileTensor:
    name = merged.stored_name(merged.architecture.head_name)
    shared = folder.file.tensor(folder.placements[merged.source_of(name)].stored)
    if not merged.is_adapted(name):
        return _kept(HEAD, shared)
    kind = type_of_matrix(target, shared.place.shape, is_head=True)
    return FileTensor(
        HEAD, shared.place.shape, kind, (lambda: as_bytes(merged.float32(name), kind, HEAD),)
    )


def _kept(name: str, tensor: StoredTensor) -> FileTensor:
    def read() -> Iterator[npt.NDArray[np.uint8]]:
        yield np.ascontiguousarray(tensor.data)
        release_pages(tensor.data)

    return FileTensor(name, tensor.place.shape, tensor.place.type, (read,))


def _changed(
    merged: MergedWeights,
    folder: GGUFFolder,
    stored: str,
    sources: list[_Source],
    target: ElementType,
) -> FileTensor:
    shape = folder.file.tensor(stored).place.shape
    is_tied = stored == EMBEDDING and HEAD not in folder.file and not merged.untied
    kind = type_of_matrix(target, shape, is_head=stored == HEAD or is_tied)
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
    """Adds a value with the type that llama.cpp expects: uint32 for integers."""
    import gguf

    if isinstance(value, np.ndarray) and not value.size:
        return  # gguf omits empty lists, too
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
    """The contents of a GGUF file."""

    architecture: str  # llama.cpp's name
    keys: Mapping[str, Any]  # metadata
    tensors: tuple[FileTensor, ...]
    file_type: FileType  # the type of most matrices
    notes: tuple[str, ...] = ()  # what llama.cpp computes differently, for the user

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def check_room(self, path: Path) -> None:
        """Raises a CheckpointError if the disk has too little free space."""
        needed = sum(tensor.nbytes + _ALIGNMENT for tensor in self.tensors) + MARGIN
        advice = "choose another folder with --gguf, or a smaller --type"
        check_disk_space(path.parent, needed, "the file", advice)

    def write(self, path: Path, progress: Callable[[str], None]) -> None:
        """Writes the file, not atomically."""
        import gguf  # slow to import

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
                        f"{tensor.name}: expected {tensor.nbytes} bytes, got {file.tell() - begin}"
                    )
                _pad(file, tensor.nbytes)


def gguf_model(
    merged: MergedWeights,
    file_type: FileType | None,
    vocabulary: Callable[[int], Mapping[str, Any]],
) -> GGUFModel:
    """The contents of a merged model's file, without reading any weight.

    If the base is a GGUF file itself, keys, vocabulary and all tensors that the adapter does not
    change are copied unchanged. ``vocabulary`` returns the keys of the tokenizer for a number of
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
                f"{folder.path}: adding tokens to the vocabulary of a GGUF file is not supported: "
                "export from the model's safetensors version"
            )
        if merged.untied:
            refuse_untied(merged, _llama_cpp(merged))
        keys = passthrough_metadata(folder) | own
        tensors = passthrough_tensors(merged, folder, file_type.kind)
        return GGUFModel(folder.file.metadata["general.architecture"], keys, tensors, file_type)
    model_type, decoder = model_type_of(folder.config), merged.architecture.config
    llama_cpp = _llama_cpp(merged)
    architecture = llama_cpp.name
    if not isinstance(decoder, Decoder):
        raise UnsupportedModelError(
            f"GGUF export of {model_type!r} models is not supported: use --adapter-only, or "
            "qlora-wgpu merge and llama.cpp's converter"
        )
    own_keys = model_keys(model_type, folder.config, decoder, llama_cpp)
    keys = {
        "general.type": "model",
        **own,
        **{f"{architecture}.{key}": value for key, value in own_keys.values.items()},
        **scalar_keys(merged, llama_cpp),
        f"{architecture}.vocab_size": merged.architecture.vocab_size,
        **vocabulary(merged.architecture.vocab_size),
    }
    tensors = tuple(model_tensors(merged, llama_cpp, file_type.kind, rope_tensors(own_keys)))
    notes = (*own_keys.notes, *_notes(tensors, file_type))
    return GGUFModel(architecture, keys, tensors, file_type, notes)


def _llama_cpp(merged: MergedWeights) -> GGUFArchitecture:
    return architecture_for(merged.folder.config, merged.architecture, "models")


def _notes(tensors: Sequence[FileTensor], file_type: FileType) -> Iterator[str]:
    kind = file_type.kind
    kept = [t.name for t in tensors if t.kind == F16 and t.shape[-1] % kind.block]
    if kept:
        yield (
            f"{len(kept)} matrices are kept in f16, such as {kept[0]}: their rows are not a "
            f"multiple of {kind.block}"
        )


def own_type(merged: MergedWeights) -> FileType:
    """The base's own type of floats; bfloat16 if it is quantized."""
    folder, linears = merged.folder, merged.architecture.every_linear
    name = merged.stored_name(f"{linears[0].name}.weight")
    kinds = {kind.name: kind for kind in (F32, F16, BF16)}
    kind = kinds.get(folder[name].dtype, BF16)
    return FILE_TYPES[kind.name.lower()]


# ---- an adapter ----------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
Pair = tuple[FloatArray, FloatArray]


def export_gguf(
    model: str | PathLike[str], adapter: str | PathLike[str], out: str | PathLike[str]
) -> int:
    """Writes an adapter for llama.cpp's ``--lora``; returns the number of adapted layers."""
    import gguf  # slow to import

    folder = ModelFolder.without_weights(model)
    refuse_scored(adapter, folder)
    config = folder.config
    architecture = find_family(config).read(config)
    llama_cpp = architecture_for(config, architecture, "adapters")
    layout = Layout(architecture, llama_cpp)
    tensors, peft = load_adapter(adapter, stacking=architecture.stacking)
    if peft.use_dora:
        raise UnsupportedModelError(
            f"{adapter} is a DoRA adapter, which llama.cpp does not support: merge it instead"
        )
    if peft.trainable_token_indices:
        raise UnsupportedModelError(
            f"{adapter} has trained rows of the embedding (trainable_token_indices), which "
            "llama.cpp's adapters do not support: merge it, or export the whole model"
        )
    if peft.modules_to_save:
        raise UnsupportedModelError(
            f"{adapter} has a whole {peft.modules_to_save[0]} (modules_to_save), which llama.cpp's "
            "adapters do not support: merge it, or export the whole model"
        )
    shapes = adapter_shapes(architecture, peft)
    refuse_other_base(adapter, peft, tensors, shapes, model, whole=False)
    tensors_of = {layer.module for layer in adapted_layers(tensors)}
    embedding = architecture.embed_name.removesuffix(".weight")
    ends = [end for end in (embedding, architecture.head.name) if end in tensors_of]
    if ends and architecture.tied:
        raise UnsupportedModelError(
            f"{adapter} adapts {ends[0]}, but embedding and head are one matrix in this base's "
            "GGUF file, to which llama.cpp cannot apply it: merge the adapter, or export the whole "
            "model"
        )
    ignored = [m for m in tensors_of if m.rpartition(".")[2] in llama_cpp.unadapted]
    if ignored:
        raise UnsupportedModelError(
            f"{adapter} adapts {min(ignored)}, for which llama.cpp ignores adapters: merge it, or "
            "export the whole model"
        )
    path = Path(out)
    writer = gguf.GGUFWriter(None, llama_cpp.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(peft.lora_alpha))
    pairs = {layer.module: _scaled(layer, peft) for layer in adapted_layers(tensors)}
    count = len(pairs)
    if llama_cpp.joins_experts:
        pairs = _with_expert_scales(pairs, architecture.experts, model)
    factors = layout.end("embed_tokens", architecture.vocab_size).factors
    if embedding in pairs and factors is not None:
        raise UnsupportedModelError(
            f"{adapter} adapts {embedding}, whose rows this base's GGUF file has with a factor: "
            "merge the adapter, or export the whole model"
        )
    if embedding in pairs:  # its rows are looked up in A, so llama.cpp swaps A and B
        a, b = pairs.pop(embedding)
        writer.add_tensor("token_embd.weight.lora_a", np.ascontiguousarray(b))
        writer.add_tensor("token_embd.weight.lora_b", np.ascontiguousarray(a.T))
    stacked = _stacked(pairs, layout.stacks(architecture.experts))
    for module, (a, b) in stacked.items():
        for part in layout.parts(module, b.shape[-2]):
            gguf_name = layout.find(f"{part.module}.weight")
            if gguf_name is None:
                raise UnsupportedModelError(f"llama.cpp has no tensor for {part.module}")
            a_part, b_part = part.by_columns(a), part.by_rows(b)
            writer.add_tensor(f"{gguf_name}.lora_a", np.ascontiguousarray(a_part))
            writer.add_tensor(f"{gguf_name}.lora_b", np.ascontiguousarray(b_part))
    _write(writer, path)
    return count


def _scaled(layer: AdaptedLayer, peft: AdapterConfig) -> Pair:
    """A and B; llama.cpp multiplies by alpha / rank, and B includes the rest of the scaling."""
    ratio = peft.scaling_of(layer.module) * len(layer.a) / peft.lora_alpha
    b = layer.b if ratio == 1.0 else (layer.b * np.float32(ratio)).astype(np.float32)
    return layer.a, b


def _with_expert_scales(
    pairs: Mapping[str, Pair], experts: Sequence[ExpertSpec], model: str | PathLike[str]
) -> dict[str, Pair]:
    """The pairs with Gemma 4's per-expert scales in B, since llama.cpp adds B·A after scaling."""
    changed = dict(pairs)
    downs = [s for s in experts if s.leaf == "down_proj" and s.linears[0].name in pairs]
    folder = ModelFolder.open(model) if downs else None
    for stack in downs:
        assert folder is not None
        name = f"{stack.at.removesuffix('experts')}router.per_expert_scale"
        for spec, factor in zip(stack.linears, folder[name].read(), strict=True):
            if spec.name in changed:
                a, b = changed[spec.name]
                changed[spec.name] = a, b * factor
    return changed


def _stacked(
    pairs: Mapping[str, Pair], experts: Iterable[tuple[str, Sequence[ExpertSpec]]]
) -> dict[str, Pair]:
    """The pairs with all of a layer's experts stacked, as llama.cpp has them."""
    stacked = dict(pairs)
    for name, stacks in experts:
        found = {stack.name: pair for stack in stacks if (pair := _stack(stacked, stack))}
        if len(stacks) == 1:
            stacked |= found
        elif found:
            stacked[name] = _joined([(found.get(s.name), s) for s in stacks])
    return stacked


def _stack(pairs: dict[str, Pair], stack: ExpertSpec) -> Pair | None:
    """A and B of all experts, removed from ``pairs``; None if none is adapted."""
    own = [pairs.pop(spec.name, None) for spec in stack.linears]
    present = [pair for pair in own if pair is not None]
    if not present:
        return None
    if len(present) < len(own) or len({len(a) for a, _ in present}) > 1:
        raise UnsupportedModelError(
            f"llama.cpp requires an adapter for all experts of a layer, of one rank: {stack.name} "
            f"has {len(present)} of {len(own)}; merge the adapter instead"
        )
    a, b = zip(*present, strict=True)
    return np.stack(a), np.stack(b)


def _joined(parts: Sequence[tuple[Pair | None, ExpertSpec]]) -> Pair:
    """One A and one B for matrices that llama.cpp joins.

    The rank is the sum of their ranks, and B is block diagonal, scaled up by the ratio of the ranks
    since llama.cpp divides by the new one.
    """
    a = np.concatenate([pair[0] for pair, _ in parts if pair is not None], axis=1)
    rank = a.shape[1]
    b = np.zeros((len(a), sum(stack.out_features for _, stack in parts), rank), np.float32)
    row = column = 0
    for pair, stack in parts:
        if pair is not None:
            width = pair[1].shape[2]
            scaled = pair[1] * np.float32(rank / width)
            b[:, row : row + stack.out_features, column : column + width] = scaled
            column += width
        row += stack.out_features
    return a, b


def _write(writer: Any, path: Path) -> None:
    with atomic_file(path) as unfinished:
        writer.write_header_to_file(path=unfinished)
        try:
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
