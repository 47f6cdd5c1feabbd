"""Copies of a model's matrices in strips (``kernels/strips.py``), made once for all texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.strips import (
    Strips,
    copy_rows,
    copy_scales,
    dense_strips,
    fits,
    quantized_strips,
)
from qlora_wgpu.ops.quantized import QuantizedMatrix, rows_of

Fill = Callable[[Graph], None]


class StripStore:
    """The strips of one model's frozen matrices, and the launches that have still to fill them.

    Attributes:
        dense: Whether quantized matrices are kept as the numbers that training multiplies with.
    """

    def __init__(self, *, dense: bool = True) -> None:
        """Has none yet.

        Args:
            dense: Whether quantized matrices are kept dequantized, in the type of frozen weights:
                bfloat16 takes three times as many bytes as codes, and 0.4 of their time.
        """
        self.dense = dense
        self._made: dict[object, Strips] = {}
        self._fills: list[Fill] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all strips so far."""
        tensors = [t for s in self._made.values() for t in (s.words, s.scales, s.minima)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def waits(self) -> bool:
        """Whether strips that launches read are still to be filled."""
        return bool(self._fills)

    def fill(self, g: Graph) -> None:
        """Adds the launches that fill what is not filled; they are to run once, and first."""
        fills, self._fills = self._fills, []
        for each in fills:
            each(g)

    def of_quantized(self, g: Graph, weights: Sequence[QuantizedMatrix]) -> Strips | None:
        """Quantized matrices of one input in strips; None where they cannot be read so."""
        if not g.profile.textures or any(_comes_and_goes(weight.codes) for weight in weights):
            return None
        key = tuple(weight.codes for weight in weights)
        if key not in self._made:
            chosen = self._numbers(g, weights) if self.dense else self._codes(g, weights)
            if chosen is None or chosen[0].words.nbytes > g.max_binding:
                return None
            self._made[key], fill = chosen
            self._fills.append(fill)
        return self._made[key]

    def _numbers(self, g: Graph, weights: Sequence[QuantizedMatrix]) -> tuple[Strips, Fill]:
        rows, name = sum(weight.rows for weight in weights), _name(weights)
        made = dense_strips(name, rows, g.weight(name, 1, weights[0].columns), _lanes(g))

        def fill(own: Graph) -> None:
            column0 = 0
            for weight in weights:
                w = own.weight(weight.name, weight.rows, weight.columns)
                weight.put_rows(own, w, 0)
                copy_rows(own, w, w.rows, made, column0)
                column0 += weight.rows

        return made, fill

    def _codes(self, g: Graph, weights: Sequence[QuantizedMatrix]) -> tuple[Strips, Fill] | None:
        rows = rows_of(g, weights)
        if rows is None or not fits(rows.form, rows.columns):
            return None
        made = quantized_strips(_name(weights), rows, _lanes(g))

        def fill(own: Graph) -> None:
            column0 = 0
            for weight in weights:
                copy_rows(own, weight.codes, weight.rows, made, column0)
                column0 += weight.rows
            copy_scales(own, rows, made)

        return made, fill

    def of_dense(self, g: Graph, w: Tensor) -> Strips | None:
        """Operands in strips; None where they cannot be read so."""
        if not g.profile.textures or _comes_and_goes(w):
            return None
        key = (w.storage, w.offset, w.shape)
        if key not in self._made:
            made = dense_strips(w.name, w.rows, w, _lanes(g))
            if made.words.nbytes > g.max_binding:
                return None
            self._made[key] = made
            self._fills.append(lambda own: copy_rows(own, w, w.rows, made, 0))
        return self._made[key]


def _name(weights: Sequence[QuantizedMatrix]) -> str:
    return "·".join(weight.name for weight in weights)


def _lanes(g: Graph) -> int:
    return g.profile.subgroup_size


def _comes_and_goes(tensor: Tensor) -> bool:
    storage = tensor.storage
    return storage is None or storage.whole.section is not None or storage.whole.on_host is not None
