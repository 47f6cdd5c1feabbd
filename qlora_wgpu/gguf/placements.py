"""Where a GGUF file has each tensor of a Hugging Face model: the inverse of ``layout.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gguf.architecture import MTP_LAYERS, Config, GGUFArchitecture, Keys
from qlora_wgpu.gguf.layout import (
    EMBEDDING,
    HEAD,
    LAYER,
    Columns,
    FloatArray,
    IntArray,
    Layout,
    TensorSlice,
)
from qlora_wgpu.gguf.rotation import ROPE_TENSORS

# ---- a placement ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transform:
    """How a tensor is computed from the file's, if it is not a permutation of their elements."""

    sources: tuple[TensorMapping, ...]  # the file's tensors
    make: Callable[[Sequence[FloatArray]], FloatArray]  # computes the tensor from ``sources``
    undo: Callable[[FloatArray], Sequence[FloatArray]]  # the inverse


@dataclass(frozen=True)
class TensorMapping:
    """Where a tensor of the model is in the file."""

    stored: str  # the name of the file's tensor
    shape: tuple[int, ...]  # of the model's tensor
    first_row: int = 0  # its first row in the file's tensor
    offset: float = 0.0  # what the file has added to the weights
    # The tensor of the same type with the rows that follow, which ``shape`` includes
    then: TensorMapping | None = None
    # The stored row of each row, with those of ``then`` numbered on; None if in order
    order: IntArray | None = field(default=None, compare=False)
    # The order of columns, if it differs
    columns: Columns | None = field(default=None, compare=False)
    # How the tensor is computed, if the file does not have its rows; then only ``shape`` counts
    change: Transform | None = field(default=None, compare=False)

    @property
    def parts(self) -> Iterator[tuple[TensorMapping, slice]]:
        """The file's tensors, and the rows that each has."""
        if self.then is None:
            yield self, slice(None)
            return
        rows = self.shape[0] - self.then.shape[0]
        yield replace(self, shape=(rows, *self.shape[1:]), then=None), slice(0, rows)
        yield self.then, slice(rows, None)

    @property
    def leaves(self) -> tuple[TensorMapping, ...]:
        """The file's tensors, in order."""
        if self.change is not None:
            return self.change.sources
        return tuple(part for part, _ in self.parts)

    def as_stored(self, array: FloatArray) -> list[FloatArray]:
        """The tensor as the file has it, for each of ``leaves``."""
        if self.change is not None:
            return list(self.change.undo(array))
        if self.offset:
            array = array + np.float32(self.offset)
        if self.columns is not None:
            array = self.columns.inverse.of(array, self.columns.width)
        if self.order is not None:
            array = np.ascontiguousarray(array[np.argsort(self.order)])
        return [array[rows] for _, rows in self.parts]


# ---- a whole file --------------------------------------------------------------------------------

_LAYER = re.compile(r"blk\.([0-9]{1,5})\.")
_KIND = re.compile(r"(.+)\.(weight|bias)")
# What of an expert a stack has
_STACKS = {
    "ffn_gate_exps": ("gate",),
    "ffn_up_exps": ("up",),
    "ffn_down_exps": ("down",),
    "ffn_gate_up_exps": ("gate", "up"),
}
# Old files hold RoPE's tables, which follow from the keys.
_REDUNDANT = re.compile(r"(blk\.[0-9]+\.)?(attn_rot_embd|rope_freqs)\.weight")


def tensor_map(
    file: GGUFFile, llama_cpp: GGUFArchitecture, architecture: Architecture, config: Config
) -> dict[str, TensorMapping]:
    """Where each tensor is, by its name in Hugging Face's files."""
    return _TensorMap(file, llama_cpp, architecture, config).found()


@dataclass(frozen=True)
class _Source:
    """The model's tensor that a tensor of the file belongs to."""

    name: str  # the tensor or its module, in layer *
    part: int = 0  # which of ``parts`` the file's tensor is
    parts: tuple[TensorSlice, ...] = ()  # all of them; none if the file has the tensor unchanged
    is_module: bool = True


class _TensorMap:
    def __init__(
        self,
        file: GGUFFile,
        llama_cpp: GGUFArchitecture,
        architecture: Architecture,
        config: Config,
    ) -> None:
        self._file, self._llama_cpp, self._config = file, llama_cpp, config
        self._architecture = architecture
        self._layout = Layout(architecture, llama_cpp)
        self._sources = self._known()
        self._small = {_of_any_layer(n): (n, s) for n, s in architecture.norm_shapes.items()}
        self._layers = config["num_hidden_layers"]
        key = f"{file.metadata.get('general.architecture')}.{MTP_LAYERS}"
        self._has_mtp_layers = bool(file.metadata.get(key, 0))

    def found(self) -> dict[str, TensorMapping]:
        found: dict[str, TensorMapping] = {}
        split: dict[str, tuple[_Source, dict[int, TensorMapping]]] = {}
        for stored in self._file.names():
            layer = _LAYER.match(stored)
            is_mtp = layer is not None and int(layer[1]) >= self._layers and self._has_mtp_layers
            if is_mtp or stored in ROPE_TENSORS or _REDUNDANT.fullmatch(stored):
                continue
            number = "" if layer is None else str(int(layer[1]))
            stem, kind = _split(stored)
            shape = self._file.tensor(stored).place.shape
            if layer is not None and self._is_stack(stem[layer.end() :]):
                found |= self._experts(stored, number, stem[layer.end() :], kind)
                continue
            source = self._sources.get(_LAYER.sub("blk.*.", stem))
            if source is None:
                raise UnsupportedModelError(
                    f"{self._file.path}: the tensor {brief(stored)} is not supported for the "
                    f"architecture {self._config['model_type']}: use the model's safetensors "
                    "version"
                )
            name = source.name.replace(".layers.*.", f".layers.{number}.")
            name += f".{kind}" if source.is_module else ""
            if len(source.parts) > 1:
                parts = split.setdefault(name, (source, {}))[1]
                parts[source.part] = TensorMapping(stored, shape)
            elif "*" in name:  # each row is a tensor in Hugging Face's files
                for row in range(shape[0]):
                    found[name.replace("*", str(row))] = TensorMapping(stored, shape[1:], row)
            else:
                found[name] = self._placed(name, stored, shape)
        for name, (source, parts) in split.items():
            if 0 in parts:  # otherwise reading the tensor fails
                found[name] = self._whole(source.parts, parts[0], parts.get(1))
        return found | dict(self._scalars())

    def _known(self) -> dict[str, _Source]:
        """The sources of the file's tensors, by their names in layer *, without an ending."""
        architecture, layout = self._architecture, self._layout
        known = {
            EMBEDDING.removesuffix(".weight"): _Source(architecture.embed_name[: -len(".weight")]),
            HEAD.removesuffix(".weight"): _Source(architecture.head.name),
        }
        linears = {_of_any_layer(spec.name): spec for spec in architecture.linears}
        for name, spec in linears.items():
            parts = tuple(layout.parts(spec.name, spec.out_features))
            for i, part in enumerate(parts):
                self._add(known, f"{part.module}.weight", _Source(name, i, parts))
            self._add(known, f"{spec.name}.weight", _Source(name))  # old files have it unsplit
        for name in (*architecture.norms, *architecture.router_shapes, *architecture.tables):
            stem, kind = _split(name)
            found = layout.find(name)
            is_module = found is not None and kind != "" and _split(found)[1] == kind
            self._add(
                known, name, _Source(_of_any_layer(stem if is_module else name), 0, (), is_module)
            )
        return known

    def _add(self, known: dict[str, _Source], name: str, source: _Source) -> None:
        stored = self._layout.find(name)
        if stored is not None:
            known.setdefault(_LAYER.sub("blk.*.", _split(stored)[0]), source)

    def _placed(self, name: str, stored: str, shape: tuple[int, ...]) -> TensorMapping:
        """A tensor that is one tensor in the file, too."""
        small = self._small.get(_of_any_layer(name))
        stem, kind = _split(name)
        if small is None:
            parts = () if kind == "" else self._parts(stem, stored, shape)
            part, offset = (parts or (TensorSlice(name),))[0], 0.0
        else:
            part, offset = self._layout.small(name), self._architecture.offset_of(small[0])
            if part.own_shape is not None:
                return self._reshaped(stored, part, shape, small[1])
            if len(small[1]) == len(shape) + 1:  # the file lacks an axis of size one
                shape = (1, *shape) if small[1][0] == 1 else (shape[0], 1, *shape[1:])
        order = None if part.rows is None else np.argsort(part.rows, kind="stable")
        columns = part.columns if kind == "weight" else None
        self._check_length(stored, shape, 0, None if order is None else len(order))
        if columns is not None:
            self._check_length(stored, shape, 1, columns.width * len(columns.order))
        if part.heads or part.decays:  # not just another order
            return _computed((TensorMapping(stored, shape),), (part,), shape, order)
        columns = None if columns is None else columns.inverse
        return TensorMapping(stored, shape, offset=offset, order=order, columns=columns)

    def _reshaped(
        self, stored: str, part: TensorSlice, shape: tuple[int, ...], own: tuple[int, ...]
    ) -> TensorMapping:
        """A small tensor of another shape in the model."""
        if shape != part.own_shape:
            raise CheckpointError(
                f"{self._file.path}: {stored} has shape {shape}, but the keys of Mamba need "
                f"{part.own_shape}"
            )
        return _computed((TensorMapping(stored, shape),), (part,), own, None)

    def _parts(self, module: str, stored: str, shape: tuple[int, ...]) -> Sequence[TensorSlice]:
        """The layout of a linear layer's rows, whose number the file determines."""
        leaf, rows = module.rpartition(".")[2], shape[0]
        heads = self._layout.paired_heads(leaf)
        if heads and rows % (2 * heads):
            raise CheckpointError(
                f"{self._file.path}: {stored} has {rows} rows, not a multiple of twice the {heads} "
                "heads"
            )
        if leaf == self._layout.by_head:
            count, size = self._config["num_attention_heads"], self._config["head_dim"]
            if rows != 3 * count * size:
                raise CheckpointError(
                    f"{self._file.path}: {stored} has shape {shape}, but {count} heads of {size} "
                    f"need {3 * count * size} rows"
                )
        own = self._sources.get(_LAYER.sub("blk.*.", _split(stored)[0]))
        return () if own is None or not own.parts else self._layout.parts(module, rows)

    def _check_length(
        self, stored: str, shape: tuple[int, ...], axis: int, length: int | None
    ) -> None:
        """Refuses a tensor whose size does not match the keys."""
        if length is not None and (len(shape) <= axis or shape[axis] != length):
            raise CheckpointError(
                f"{self._file.path}: {stored} has shape {shape}, but the heads of the delta nets "
                f"need {length} {'columns' if axis else 'rows'}"
            )

    def _whole(
        self, parts: tuple[TensorSlice, ...], first: TensorMapping, second: TensorMapping | None
    ) -> TensorMapping:
        rows_of_parts = [part.rows for part in parts if part.rows is not None]
        order = np.argsort(np.concatenate(rows_of_parts), kind="stable")
        if parts[0].heads:
            return self._latent(parts, first, second, order)
        places = [p for p in (first, second) if p is not None]
        rows, widths = sum(p.shape[0] for p in places), {p.shape[1:] for p in places}
        kinds = {self._file.tensor(place.stored).place.type.name for place in places}
        is_joined = bool((order == np.arange(len(order))).all())
        if is_joined and (second is None or len(kinds) > 1 or len(widths) > 1):
            raise UnsupportedModelError(
                f"{self._file.path}: {first.stored} has no other half of the same type and width: "
                "use the model's safetensors version"
            )
        shape = (rows, *first.shape[1:])
        if is_joined:
            return replace(first, shape=shape, then=second)
        if second is None or rows != len(order) or len(widths) > 1:
            raise CheckpointError(
                f"{self._file.path}: {first.stored} and its attn_gate have {rows} rows, but its "
                f"key heads need {len(order)}"
            )
        if len(kinds) == 1:
            return replace(first, shape=shape, then=second, order=order)
        return _computed((first, second), parts, shape, order)

    def _latent(
        self,
        parts: tuple[TensorSlice, ...],
        k: TensorMapping,
        v: TensorMapping | None,
        order: IntArray,
    ) -> TensorMapping:
        """kv_b_proj from keys and values, which the file has head by head, keys transposed."""
        config, heads = self._config, parts[0].heads
        expected = (heads, config["kv_lora_rank"], config["qk_nope_head_dim"])
        if v is None or k.shape != expected or v.shape != (heads, config["v_head_dim"], k.shape[1]):
            raise CheckpointError(
                f"{self._file.path}: {k.stored} has shape {k.shape} and attn_v_b "
                f"{None if v is None else v.shape}, but the keys require {expected}"
            )
        return _computed((k, v), parts, (len(order), k.shape[1]), order)

    def _is_stack(self, stem: str) -> bool:
        """Whether a layer's tensor is one of all experts, of what these have."""
        has_experts = bool(self._architecture.experts) and stem in _STACKS
        return has_experts and {*_STACKS[stem]} <= {*self._architecture.stacking.kinds}

    def _experts(
        self, stored: str, layer: str, stem: str, kind: str
    ) -> Mapping[str, TensorMapping]:
        """Each expert's matrices or biases in a stack."""
        shape, which = self._file.tensor(stored).place.shape, _STACKS[stem]
        if kind == "bias" and len(shape) == 2 and len(which) == 1:
            shape = (shape[0], 1, shape[1])  # each row is a bias
        if len(shape) != 3 or shape[1] % len(which):
            raise CheckpointError(
                f"{self._file.path}: {stored} has shape {shape}, which is not a stack of experts"
            )
        count, rows, columns = shape[0], shape[1] // len(which), shape[2]
        own = (columns,) if kind == "bias" else (rows, columns)
        stacking = self._architecture.stacking
        leaves = [stacking.leaves[stacking.kinds.index(kind)] for kind in which]
        at = _of_any_layer(self._architecture.experts[0].at)
        at = at.replace(".layers.*.", f".layers.{layer}.")
        return {
            f"{at}.{number}.{leaf}.{kind}": TensorMapping(
                stored, own, (number * len(leaves) + part) * rows
            )
            for number in range(count)
            for part, leaf in enumerate(leaves)
        }

    def _scalars(self) -> Iterator[tuple[str, TensorMapping]]:
        """Adds keys with a number for each layer to the file's tensors."""
        keys = Keys(self._file.metadata, self._file.path, prefix="")
        for key, leaf in self._llama_cpp.scalars:
            for i, value in enumerate(keys.each(key, self._layers)):
                stored, name = f"{key}.{i}", f"model.layers.{i}.{leaf}"
                self._file.add_number(stored, value)
                yield name, TensorMapping(stored, self._architecture.norm_shapes[name])


def _computed(
    sources: tuple[TensorMapping, ...],
    parts: tuple[TensorSlice, ...],
    shape: tuple[int, ...],
    order: IntArray | None,
) -> TensorMapping:
    def make(arrays: Sequence[FloatArray]) -> FloatArray:
        rows = np.concatenate([p.back(a) for p, a in zip(parts, arrays, strict=True)])
        return rows if order is None else rows[order]

    def undo(array: FloatArray) -> Sequence[FloatArray]:
        return [part.of(array) for part in parts]

    return TensorMapping(sources[0].stored, shape, change=Transform(sources, make, undo))


def _split(name: str) -> tuple[str, str]:
    """A name without its ending, and the ending: weight, bias or empty."""
    found = _KIND.fullmatch(name)
    return (name, "") if found is None else (found[1], found[2])


def _of_any_layer(name: str) -> str:
    return LAYER.sub(".layers.*.", name, count=1)
