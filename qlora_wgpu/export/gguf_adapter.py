"""A PEFT adapter as a LoRA adapter of llama.cpp, in GGUF."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.atomic import atomic_file
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import ExpertSpec, find_family
from qlora_wgpu.gguf.architectures import architecture_of, model_type_of
from qlora_wgpu.gguf.layout import Layout
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.compatibility import adapter_shapes, refuse_other_base
from qlora_wgpu.lora.peft_names import AdaptedLayer, adapted_layers

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
