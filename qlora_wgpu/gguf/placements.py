"""Where each of a model's tensors lies in a GGUF file, by the names of Hugging Face's files.

It is the inverse of how such a file is laid out (``layout.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gguf.architecture import Config, GGUFArchitecture
from qlora_wgpu.gguf.keys import SPARE, Keys
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
    """How a tensor is made of floats that a file has in its place, where no order of them is it."""

    sources: tuple[TensorMapping, ...]  # what the file has
    # Makes the tensor of these, each by its placement's shape
    make: Callable[[Sequence[FloatArray]], FloatArray]
    # What the file would have for a tensor, in the order of ``sources``
    undo: Callable[[FloatArray], Sequence[FloatArray]]


@dataclass(frozen=True)
class TensorMapping:
    """A tensor, or some rows of one."""

    stored: str  # the name of the file's tensor
    shape: tuple[int, ...]  # the dimensions of what is meant here
    first_row: int = 0  # the first of its rows among those of the file's
    offset: float = 0.0  # what was added to the weights
    # What has the rows that follow, of the same type; ``shape`` has them, too
    then: TensorMapping | None = None
    # Which stored row each is, those of ``then`` counted on; None where they are in order
    order: IntArray | None = field(default=None, compare=False)
    # The order of columns, if it is another
    columns: Columns | None = field(default=None, compare=False)
    # What it is made of, if the file has no rows of it; of the rest ``shape`` alone counts then
    change: Transform | None = field(default=None, compare=False)

    @property
    def parts(self) -> Iterator[tuple[TensorMapping, slice]]:
        """The parts, and which rows are theirs."""
        if self.then is None:
            yield self, slice(None)
            return
        rows = self.shape[0] - self.then.shape[0]
        yield replace(self, shape=(rows, *self.shape[1:]), then=None), slice(0, rows)
        yield self.then, slice(rows, None)

    @property
    def leaves(self) -> tuple[TensorMapping, ...]:
        """What the file has of it, one after the other."""
        if self.change is not None:
            return self.change.sources
        return tuple(part for part, _ in self.parts)

    def as_stored(self, array: FloatArray) -> list[FloatArray]:
        """The tensor as the file has it, in parts as ``leaves`` are."""
        if self.change is not None:
            return list(self.change.undo(array))
        if self.offset:
            array = array + np.float32(self.offset)
        if self.columns is not None:
            array = self.columns.inverse.of(array, self.columns.width)
        if self.order is not None:
            array = np.ascontiguousarray(array[np.argsort(self.order)])
        return [array[rows] for _, rows in self.parts]


# ---- all of a file's -----------------------------------------------------------------------------

_LAYER = re.compile(r"blk\.([0-9]{1,5})\.")
_KIND = re.compile(r"(.+)\.(weight|bias)")
# Which of an expert's gate, up and down a stack of them has
_STACKS = {
    "ffn_gate_exps": (0,),
    "ffn_up_exps": (1,),
    "ffn_down_exps": (2,),
    "ffn_gate_up_exps": (0, 1),
}
# Tables that follow from the keys, which old files hold as well.
_REPEATED = re.compile(r"(blk\.[0-9]+\.)?(attn_rot_embd|rope_freqs)\.weight")


def tensor_map(
    file: GGUFFile, llama_cpp: GGUFArchitecture, architecture: Architecture, config: Config
) -> dict[str, TensorMapping]:
    """Where each tensor lies, by its name in Hugging Face's files."""
    return _Placing(file, llama_cpp, architecture, config).found()


@dataclass(frozen=True)
class _Source:
    """What a tensor of the file is one of."""

    name: str  # the model's tensor, or its module, of layer *
    part: int = 0  # which of its parts it is
    parts: tuple[TensorSlice, ...] = ()  # all of them; none where the file has it as it is
    is_module: bool = True


class _Placing:
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
        key = f"{file.metadata.get('general.architecture')}.{SPARE}"
        self._has_spare = bool(file.metadata.get(key, 0))

    def found(self) -> dict[str, TensorMapping]:
        found: dict[str, TensorMapping] = {}
        parted: dict[str, tuple[_Source, dict[int, TensorMapping]]] = {}
        for stored in self._file.names():
            layer = _LAYER.match(stored)
            is_spare = layer is not None and int(layer[1]) >= self._layers and self._has_spare
            if is_spare or stored in ROPE_TENSORS or _REPEATED.fullmatch(stored):
                continue
            number = "" if layer is None else str(int(layer[1]))
            stem, kind = _split(stored)
            shape = self._file.tensor(stored).place.shape
            if layer is not None and stem[layer.end() :] in _STACKS and self._architecture.experts:
                found |= self._experts(stored, number, stem[layer.end() :], kind)
                continue
            source = self._sources.get(_LAYER.sub("blk.*.", stem))
            if source is None:
                raise UnsupportedModelError(
                    f"{self._file.path} holds the tensor {brief(stored)}, which is not computed "
                    f"for the architecture {self._config['model_type']}: take the model's "
                    "safetensors version"
                )
            name = source.name.replace(".layers.*.", f".layers.{number}.")
            name += f".{kind}" if source.is_module else ""
            if len(source.parts) > 1:
                known = parted.setdefault(name, (source, {}))
                known[1][source.part] = TensorMapping(stored, shape)
            elif "*" in name:  # rows that are tensors of their own in Hugging Face's files
                for row in range(shape[0]):
                    found[name.replace("*", str(row))] = TensorMapping(stored, shape[1:], row)
            else:
                found[name] = self._placed(name, stored, shape)
        for name, (source, parts) in parted.items():
            if 0 in parts:  # else what reads it will miss it
                found[name] = self._whole(source.parts, parts[0], parts.get(1))
        return found | dict(self._scalars())

    def _known(self) -> dict[str, _Source]:
        """What tensors of the file are, by their names without an ending, of layer *."""
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
            self._add(known, f"{spec.name}.weight", _Source(name))  # whole, as old files have it
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
        """A tensor that the file has in one."""
        small = self._small.get(_of_any_layer(name))
        stem, kind = _split(name)
        if small is None:
            parts = () if kind == "" else self._parts(stem, stored, shape)
            part, offset = (parts or (TensorSlice(name),))[0], 0.0
        else:
            part, offset = self._layout.small(name), self._architecture.offset_of(small[0])
            if len(small[1]) == len(shape) + 1:  # an axis of one, which the file has not
                shape = (1, *shape) if small[1][0] == 1 else (shape[0], 1, *shape[1:])
        order = None if part.rows is None else np.argsort(part.rows, kind="stable")
        columns = part.columns if kind == "weight" else None
        self._check_length(stored, shape, 0, None if order is None else len(order))
        if columns is not None:
            self._check_length(stored, shape, 1, columns.width * len(columns.order))
        if not part.is_order:
            return _changed((TensorMapping(stored, shape),), (part,), shape, order)
        columns = None if columns is None else columns.inverse
        return TensorMapping(stored, shape, offset=offset, order=order, columns=columns)

    def _parts(self, module: str, stored: str, shape: tuple[int, ...]) -> Sequence[TensorSlice]:
        """The order in which a file has a linear layer's rows, of which it may have any number."""
        leaf, rows = module.rpartition(".")[2], shape[0]
        heads = self._layout.rotating_heads(leaf)
        if heads and rows % (2 * heads):
            raise CheckpointError(
                f"{self._file.path}: {stored} has {rows} rows, which are no pairs of {heads} heads"
            )
        if leaf == self._layout.by_head:
            count, size = self._config["num_attention_heads"], self._config["head_dim"]
            if rows != 3 * count * size:
                raise CheckpointError(
                    f"{self._file.path}: {stored} has shape {shape}, where {count} heads of {size} "
                    f"make {3 * count * size}"
                )
        own = self._sources.get(_LAYER.sub("blk.*.", _split(stored)[0]))
        return () if own is None or not own.parts else self._layout.parts(module, rows)

    def _check_length(
        self, stored: str, shape: tuple[int, ...], axis: int, length: int | None
    ) -> None:
        """Refuses a tensor that is not of the heads that the keys tell."""
        if length is not None and (len(shape) <= axis or shape[axis] != length):
            raise CheckpointError(
                f"{self._file.path}: {stored} has shape {shape}, where the heads of the delta nets "
                f"make {length}"
            )

    def _whole(
        self, parts: tuple[TensorSlice, ...], first: TensorMapping, second: TensorMapping | None
    ) -> TensorMapping:
        """A tensor that the file has in two."""
        taken = [part.rows for part in parts if part.rows is not None]
        order = np.argsort(np.concatenate(taken), kind="stable")
        if parts[0].heads:
            return self._latent(parts, first, second, order)
        places = [p for p in (first, second) if p is not None]
        rows, widths = sum(p.shape[0] for p in places), {p.shape[1:] for p in places}
        kinds = {self._file.tensor(place.stored).place.type.name for place in places}
        is_joined = bool((order == np.arange(len(order))).all())
        if is_joined and (second is None or len(kinds) > 1 or len(widths) > 1):
            raise UnsupportedModelError(
                f"{self._file.path}: {first.stored} has no other half of its type and width: take "
                "the model's safetensors version"
            )
        shape = (rows, *first.shape[1:])
        if is_joined:
            return replace(first, shape=shape, then=second)
        if second is None or rows != len(order) or len(widths) > 1:
            raise CheckpointError(
                f"{self._file.path}: {first.stored} and its attn_gate have {rows} rows together, "
                f"where the heads of its keys have {len(order)}"
            )
        if len(kinds) == 1:
            return replace(first, shape=shape, then=second, order=order)
        return _changed((first, second), parts, shape, order)

    def _latent(
        self,
        parts: tuple[TensorSlice, ...],
        k: TensorMapping,
        v: TensorMapping | None,
        order: IntArray,
    ) -> TensorMapping:
        """kv_b_proj of its two halves, the first of which is stored head by head, transposed."""
        config, heads = self._config, parts[0].heads
        expected = (heads, config["kv_lora_rank"], config["qk_nope_head_dim"])
        if v is None or k.shape != expected or v.shape != (heads, config["v_head_dim"], k.shape[1]):
            raise CheckpointError(
                f"{self._file.path}: {k.stored} has shape {k.shape}, and attn_v_b "
                f"{None if v is None else v.shape}, where the keys tell {expected}"
            )
        return _changed((k, v), parts, (len(order), k.shape[1]), order)

    def _experts(
        self, stored: str, layer: str, stem: str, kind: str
    ) -> Mapping[str, TensorMapping]:
        """Each expert's layers, of a stack of them."""
        shape, which = self._file.tensor(stored).place.shape, _STACKS[stem]
        if kind == "bias" and len(shape) == 2 and len(which) == 1:
            shape = (shape[0], 1, shape[1])  # a row of the file's is a bias
        if len(shape) != 3 or shape[1] % len(which):
            raise CheckpointError(
                f"{self._file.path}: {stored} has shape {shape}, which is no stack's"
            )
        count, rows, columns = shape[0], shape[1] // len(which), shape[2]
        own = (columns,) if kind == "bias" else (rows, columns)
        leaves = [self._architecture.stacking.leaves[i] for i in which]
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
        """What is a number of each layer among the keys, by names that the file finds it by."""
        keys = Keys(self._file.metadata, self._file.path, prefix="")
        for key, leaf in self._llama_cpp.scalars:
            for i, value in enumerate(keys.each(key, self._layers)):
                stored, name = f"{key}.{i}", f"model.layers.{i}.{leaf}"
                self._file.add_number(stored, value)
                yield name, TensorMapping(stored, self._architecture.norm_shapes[name])


def _changed(
    sources: tuple[TensorMapping, ...],
    parts: tuple[TensorSlice, ...],
    shape: tuple[int, ...],
    order: IntArray | None,
) -> TensorMapping:
    """What is made of a file's tensors, which are its parts."""

    def make(arrays: Sequence[FloatArray]) -> FloatArray:
        rows = np.concatenate([p.back(a) for p, a in zip(parts, arrays, strict=True)])
        return rows if order is None else rows[order]

    def undo(array: FloatArray) -> Sequence[FloatArray]:
        return [part.of(array) for part in parts]

    return TensorMapping(sources[0].stored, shape, change=Transform(sources, make, undo))


def _split(name: str) -> tuple[str, str]:
    """A name without its ending, and that, if it has one that modules' tensors have."""
    found = _KIND.fullmatch(name)
    return (name, "") if found is None else (found[1], found[2])


def _of_any_layer(name: str) -> str:
    return LAYER.sub(".layers.*.", name, count=1)
