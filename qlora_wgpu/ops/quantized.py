"""Quantized matrices on the device: stored as codes, dequantized just before use, or packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import ROW_UNIT, Tensor, matrix
from qlora_wgpu.kernels.dequantize import (
    DEQUANTIZE,
    Dequantization,
    GroupDequantization,
    QuantizedView,
    whole_blocks,
)
from qlora_wgpu.kernels.gemm.packed import (
    PackedWeights,
    copy_rows,
    copy_scales,
    decodes,
    fits,
    packed_codes,
    packed_dense,
)
from qlora_wgpu.ops.tensor import one_below_the_other
from qlora_wgpu.weight_format import WeightFormat

EXPERT_WORDS = 64  # alignment of an expert's parts, so that a binding may begin there
_EXPERT_BYTES = 64 << 20  # of operands dequantized at once

# ---- codes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized (out_features, in_features) matrix."""

    name: str
    rows: int
    columns: int
    form: WeightFormat  # how it is stored
    codes: Tensor  # as in ``QuantizedWeight``, in words
    # float32 scales of the blocks, or their 8-bit codes if double-quantized; scales and minima
    # alternate.
    absmax: Tensor
    maps: Tensor  # the values of the codes, then the 256 of the scales' codes and their offset
    nested_absmax: Tensor | None  # scales of the scales, if double-quantized
    # ``pair_values`` of the codes in a texture, for software GPUs if 32 codes share a row and a
    # block.
    codebook: Tensor | None = None
    # The number of matrices of ``rows`` rows; if more than one, their parts follow each other in
    # the tensors above, aligned to ``EXPERT_WORDS`` words.
    experts: int = 1
    # ``(first row or expert, operands)`` if it is also kept dequantized, in the same shards as when
    # it is dequantized on use (``row_cuts``, ``expert_cuts``); filled once.
    kept: tuple[tuple[int, Tensor], ...] = ()

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Dequantizes shard by shard; the memory of each is freed after its use."""
        if self.kept:
            yield from self.kept
            return
        for row0, rows in self.row_cuts(g.weight_dtype, g.max_binding):
            w = g.weight(self.name, rows, self.columns)
            self._put(g, w, row0)
            yield row0, w

    def row_cuts(self, dtype: str, max_binding: int) -> Iterator[tuple[int, int]]:
        """The first row and number of rows of each shard, for an element type."""
        row_bytes = matrix("", 1, self.columns, dtype).nbytes
        return _cut(self.rows, max(max_binding // row_bytes // ROW_UNIT * ROW_UNIT, ROW_UNIT))

    def expert_cuts(self, dtype: str, max_binding: int) -> Iterator[tuple[int, int]]:
        """The first expert and number of experts of each shard."""
        one = matrix("", self.rows, self.columns, dtype).nbytes
        return _cut(self.experts, max(min(max_binding, _EXPERT_BYTES) // one, 1))

    def fill(self, g: Graph) -> None:
        for first, w in self.kept:
            self._put(g, w, first)

    def _put(self, g: Graph, w: Tensor, first: int) -> None:
        self._launch(g, w, *((0, first) if self.experts == 1 else (first, 0)))

    @property
    def parts(self) -> dict[str, Tensor]:
        parts = {
            "codes": self.codes,
            "absmax": self.absmax,
            "nested": self.nested_absmax,
            "maps": self.maps,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def put_rows(self, g: Graph, w: Tensor, row0: int) -> None:
        """Dequantizes the whole matrix into an operand from row ``row0`` on."""
        self._launch(g, w, 0, 0, among=row0)

    def expert_shards(self, g: Graph) -> Iterator[tuple[int, int, Tensor]]:
        for first, kept in self.kept:
            yield first, kept.rows // self.rows, kept
        if self.kept:
            return
        for first, count in self.expert_cuts(g.weight_dtype, g.max_binding):
            w = g.weight(self.name, count * self.rows, self.columns)
            self._put(g, w, first)
            yield first, count, w

    def _stride(self, part: Tensor | None) -> int:
        return 0 if part is None else part.columns // self.experts

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements of codes, absmax, nested_absmax and maps from one expert to the next."""
        codes, absmax = self._stride(self.codes), self._stride(self.absmax)
        return codes, absmax, self._stride(self.nested_absmax), self._stride(self.maps)

    def _launch(
        self, g: Graph, w: Tensor, expert: int, row0: int, among: int | None = None
    ) -> None:
        def rest_of(part: Tensor) -> Tensor:
            skipped = expert * self._stride(part)
            rest = part.columns - skipped
            return replace(part, columns=rest, stride=rest, offset=4 * skipped) if expert else part

        parts = {name: rest_of(part) for name, part in self.parts.items()}
        if "nested" in parts:
            parts["nested_absmax"] = parts.pop("nested")
        problem = Dequantization(
            w, row0, parts, self.codebook, self.form, self.experts, self.rows, self.strides, among
        )
        DEQUANTIZE.launch(g, problem)


def kept_together(matrices: Sequence[QuantizedMatrix]) -> Tensor | None:
    """Kept matrices as one operand; None if they are not adjacent."""
    if any(len(matrix.kept) != 1 for matrix in matrices):
        return None
    return one_below_the_other([matrix.kept[0][1] for matrix in matrices])


def dequantize_together(g: Graph, w: Tensor, matrices: Sequence[QuantizedMatrix]) -> None:
    """Dequantizes up to three matrices into w, stacked; in one launch if they are adjacent."""
    group = None if matrices[0].form.block_rows is not None else _view(g, matrices)
    if group is not None:
        GroupDequantization(w, group).launch(g)
        return
    row0 = 0
    for each in matrices:
        each.put_rows(g, w, row0)
        row0 += each.rows


def rows_of(g: Graph, matrices: Sequence[QuantizedMatrix]) -> QuantizedView | None:
    """Matrices for products of few rows; None if they must be dequantized first."""
    view = _view(g, matrices)
    return view if view is not None and decodes(view.form, view.columns) else None


def _view(g: Graph, matrices: Sequence[QuantizedMatrix]) -> QuantizedView | None:
    """Matrices whose parts are words of one binding; None if they are not adjacent."""
    form, columns = matrices[0].form, matrices[0].columns
    alike = all(matrix.form.key == form.key for matrix in matrices)
    if not alike or not whole_blocks(form, columns, 8):
        return None
    parts = [part for matrix in matrices for part in matrix.parts.values()]
    places = {(part.storage.group, part.storage.within) for part in parts if part.storage}
    if len(places) > 1 or places & {(None, None)} or not all(part.storage for part in parts):
        return None
    first, last = min(parts, key=_first_byte), max(parts, key=_first_byte)
    begin = _first_byte(first)
    words = (_first_byte(last) + last.nbytes - begin) // 4
    if 4 * words > g.max_binding:
        return None
    begins = {
        name: [(_first_byte(matrix.parts[name]) - begin) // 4 for matrix in matrices]
        for name in matrices[0].parts
    }
    group = replace(first, columns=words, stride=words, dtype="uint32")
    rows = [matrix.rows for matrix in matrices]
    return QuantizedView(group, begins, rows, columns, form, matrices[0].strides)


def _first_byte(part: Tensor) -> int:
    assert part.storage is not None
    return part.storage.first_byte + part.offset


def _cut(count: int, most: int) -> Iterator[tuple[int, int]]:
    return ((first, min(most, count - first)) for first in range(0, count, most))


def pair_values(quant_map: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The two values of each byte of codes, the high nibble's first: (256, 4), the rest zero."""
    pairs = np.zeros((256, 4), np.float32)
    code = np.arange(256)
    pairs[:, 0], pairs[:, 1] = quant_map[code >> 4], quant_map[code & 15]
    return pairs


# ---- packed weights --------------------------------------------------------------------------

Fill = Callable[[Graph], None]


class PackedWeightCache:
    """The packed weights of one model, and the launches that are still needed to fill them.

    Attributes:
        dense: Whether quantized matrices are packed dequantized, as in training.
    """

    def __init__(self, *, dense: bool = True) -> None:
        """Has none yet.

        Dense packed weights have the type of frozen weights: bfloat16 takes three times the bytes
        of codes, and 0.4 of their time.
        """
        self.dense = dense
        self._made: dict[object, PackedWeights] = {}
        self._fills: list[Fill] = []

    @property
    def nbytes(self) -> int:
        tensors = [t for s in self._made.values() for t in (s.words, s.scales, s.minima)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def needs_fill(self) -> bool:
        return bool(self._fills)

    def fill(self, g: Graph) -> None:
        """Adds the launches that fill them; they must run once, before all others."""
        fills, self._fills = self._fills, []
        for each in fills:
            each(g)

    def of_quantized(self, g: Graph, weights: Sequence[QuantizedMatrix]) -> PackedWeights | None:
        """Quantized matrices of one input, packed; None if that is not supported."""
        if not g.profile.textures or any(_is_offloaded(weight.codes) for weight in weights):
            return None
        key = tuple(weight.codes for weight in weights)
        if key not in self._made:
            chosen = self._dense(g, weights) if self.dense else self._codes(g, weights)
            if chosen is None or chosen[0].words.nbytes > g.max_binding:
                return None
            self._made[key], fill = chosen
            self._fills.append(fill)
        return self._made[key]

    def _dense(self, g: Graph, weights: Sequence[QuantizedMatrix]) -> tuple[PackedWeights, Fill]:
        rows, name = sum(weight.rows for weight in weights), _name(weights)
        made = packed_dense(name, rows, g.weight(name, 1, weights[0].columns), _lanes(g))

        def fill(own: Graph) -> None:
            column0 = 0
            for weight in weights:
                w = own.weight(weight.name, weight.rows, weight.columns)
                weight.put_rows(own, w, 0)
                copy_rows(own, w, w.rows, made, column0)
                column0 += weight.rows

        return made, fill

    def _codes(
        self, g: Graph, weights: Sequence[QuantizedMatrix]
    ) -> tuple[PackedWeights, Fill] | None:
        rows = rows_of(g, weights)
        if rows is None or not fits(rows.form, rows.columns):
            return None
        made = packed_codes(_name(weights), rows, _lanes(g))

        def fill(own: Graph) -> None:
            column0 = 0
            for weight in weights:
                copy_rows(own, weight.codes, weight.rows, made, column0)
                column0 += weight.rows
            copy_scales(own, rows, made)

        return made, fill

    def of_dense(self, g: Graph, w: Tensor) -> PackedWeights | None:
        """Operands, packed; None if that is not supported."""
        if not g.profile.textures or _is_offloaded(w):
            return None
        key = (w.storage, w.offset, w.shape)
        if key not in self._made:
            made = packed_dense(w.name, w.rows, w, _lanes(g))
            if made.words.nbytes > g.max_binding:
                return None
            self._made[key] = made
            self._fills.append(lambda own: copy_rows(own, w, w.rows, made, 0))
        return self._made[key]


def _name(weights: Sequence[QuantizedMatrix]) -> str:
    return "·".join(weight.name for weight in weights)


def _lanes(g: Graph) -> int:
    return g.profile.subgroup_size


def _is_offloaded(tensor: Tensor) -> bool:
    storage = tensor.storage
    return storage is None or storage.whole.group is not None or storage.whole.on_host is not None
