"""A model with an adapter, or the adapter alone, as a GGUF file."""

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
from qlora_wgpu.checkpoint.gguf.file import StoredTensor
from qlora_wgpu.checkpoint.gguf.header import ElementType
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
    type_within,
)
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.families.family import ExpertSpec, find_family
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.gguf.architecture import GGUFArchitecture
from qlora_wgpu.gguf.architectures import architecture_of, model_type_of
from qlora_wgpu.gguf.config import model_keys, rope_tensors, scalar_keys
from qlora_wgpu.gguf.folder import GGUFFolder
from qlora_wgpu.gguf.layout import EMBEDDING, HEAD, Layout
from qlora_wgpu.gguf.placements import TensorMapping
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.compatibility import adapter_shapes, refuse_other_base
from qlora_wgpu.lora.peft_names import AdaptedLayer, adapted_layers
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


FloatArray = npt.NDArray[np.float32]
Pair = tuple[FloatArray, FloatArray]


def export_gguf(
    model: str | PathLike[str], adapter: str | PathLike[str], out: str | PathLike[str]
) -> int:
    """Writes an adapter that llama.cpp loads with ``--lora`` beside the base model's GGUF."""
    import gguf  # takes its time, for those alone who need it

    config = ModelFolder.without_weights(model).config
    architecture = find_family(config).read(config)
    llama_cpp = architecture_of(
        model_type_of(config), "adapters", has_experts=bool(architecture.experts)
    )
    layout = Layout(architecture, llama_cpp)
    tensors, peft = load_adapter(adapter, stacking=architecture.stacking)
    if peft.use_dora:
        raise UnsupportedModelError(
            f"{adapter} is a DoRA adapter, which llama.cpp cannot apply: merge it instead"
        )
    if peft.trainable_token_indices:
        raise UnsupportedModelError(
            f"{adapter} has trained rows of the embedding (trainable_token_indices), which "
            "llama.cpp's adapters have not: merge it, or export the whole model"
        )
    if peft.modules_to_save:
        raise UnsupportedModelError(
            f"{adapter} has a whole {peft.modules_to_save[0]} (modules_to_save), which llama.cpp's "
            "adapters have not: merge it, or export the whole model"
        )
    shapes = adapter_shapes(architecture, peft)
    refuse_other_base(adapter, peft, tensors, shapes, model, whole=False)
    tensors_of = {layer.module for layer in adapted_layers(tensors)}
    embedding = architecture.embed_name.removesuffix(".weight")
    ends = [end for end in (embedding, architecture.head.name) if end in tensors_of]
    if ends and architecture.tied:
        raise UnsupportedModelError(
            f"{adapter} adapts {ends[0]}, and embedding and head are one matrix in this base's "
            "GGUF, for which llama.cpp would take it twice or not at all: merge the adapter, or "
            "export the whole model"
        )
    left_out = [m for m in tensors_of if m.rpartition(".")[2] in llama_cpp.unadapted]
    if left_out:
        raise UnsupportedModelError(
            f"{adapter} adapts {min(left_out)}, where llama.cpp does not look for an adapter and "
            "would leave it out: merge it, or export the whole model"
        )
    path = Path(out)
    writer = gguf.GGUFWriter(None, llama_cpp.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(peft.lora_alpha))
    pairs = {layer.module: _scaled(layer, peft) for layer in adapted_layers(tensors)}
    count = len(pairs)
    if llama_cpp.joins_experts:
        pairs = _past_factors(pairs, architecture.experts, model)
    if embedding in pairs:  # whose rows are looked up in A: llama.cpp has the two the other way
        a, b = pairs.pop(embedding)
        writer.add_tensor("token_embd.weight.lora_a", np.ascontiguousarray(b))
        writer.add_tensor("token_embd.weight.lora_b", np.ascontiguousarray(a.T))
    stacked = _stacked(pairs, layout.stacks(architecture.experts))
    for module, (a, b) in stacked.items():
        for part in layout.parts(module, b.shape[-2]):
            gguf_name = layout.find(f"{part.module}.weight")
            if gguf_name is None:
                raise UnsupportedModelError(f"llama.cpp has no name for {part.module}")
            a_part, b_part = part.by_columns(a), part.by_rows(b)
            writer.add_tensor(f"{gguf_name}.lora_a", np.ascontiguousarray(a_part))
            writer.add_tensor(f"{gguf_name}.lora_b", np.ascontiguousarray(b_part))
    _write(writer, path)
    return count


def _scaled(layer: AdaptedLayer, peft: AdapterConfig) -> Pair:
    """A and B: llama.cpp multiplies by alpha / rank; whatever else the scaling is goes into B."""
    ratio = peft.scaling_of(layer.module) * len(layer.a) / peft.lora_alpha
    b = layer.b if ratio == 1.0 else (layer.b * np.float32(ratio)).astype(np.float32)
    return layer.a, b


def _past_factors(
    pairs: Mapping[str, Pair], experts: Sequence[ExpertSpec], model: str | PathLike[str]
) -> dict[str, Pair]:
    """The pairs with the factors of Gemma 4's experts in B.

    They multiply what an expert makes, and llama.cpp adds an adapter's share after that.
    """
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
    """The pairs with those of a layer's experts in one: llama.cpp has all experts in one tensor."""
    stacked = dict(pairs)
    for name, stacks in experts:
        made = {stack.name: pair for stack in stacks if (pair := _stack(stacked, stack))}
        if len(stacks) == 1:
            stacked |= made
        elif made:
            stacked[name] = _joined([(made.get(s.name), s) for s in stacks])
    return stacked


def _stack(pairs: dict[str, Pair], stack: ExpertSpec) -> Pair | None:
    """A and B of all experts, which are taken out of the pairs; None where none is adapted."""
    own = [pairs.pop(spec.name, None) for spec in stack.linears]
    present = [pair for pair in own if pair is not None]
    if not present:
        return None
    if len(present) < len(own) or len({len(a) for a, _ in present}) > 1:
        raise UnsupportedModelError(
            f"llama.cpp adapts all experts of a layer, and with one rank: {stack.name} has "
            f"{len(present)} of {len(own)}; merge the adapter instead"
        )
    a, b = zip(*present, strict=True)
    return np.stack(a), np.stack(b)


def _joined(parts: Sequence[tuple[Pair | None, ExpertSpec]]) -> Pair:
    """One A and one B for a matrix that is several here, each of which may have its own.

    The rank is the sum of theirs, B has zeros outside of what is each one's, and is as many times
    as large as the rank, by which llama.cpp divides.
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
