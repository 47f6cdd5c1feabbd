"""What kernels read and write of an adapter: tensors within its parameters and its gradient."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div, padded
from qlora_wgpu.graph.pieces import Pieces
from qlora_wgpu.graph.tensor import Tensor, matrix, row
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.flat_vector import FlatVector, Place
from qlora_wgpu.lora.names import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TOKENS,
    WHOLE,
    tensor_name,
)
from qlora_wgpu.lora.tokens import Vocabulary
from qlora_wgpu.ops.trained_matrix import TrainedMatrix
from qlora_wgpu.ops.trained_rows import TrainedRows


@dataclass(frozen=True)
class AdapterTensors:
    """Finds tensors by their places, in the pieces of both vectors.

    Attributes:
        flat: The places of all tensors.
        peft: Ranks and scalings.
        dropout: Of what layers read; PEFT drops nothing of what is looked up.
        use_dora: Whether layers have magnitudes.
        parameters: The flat vector of all A and B.
        gradient: Their gradients.
    """

    flat: FlatVector
    peft: AdapterConfig
    dropout: float
    use_dora: bool
    parameters: Pieces
    gradient: Pieces

    def pair(self, spec: LinearSpec, stack: ExpertSpec | None = None) -> Lora:
        """A layer's pair, or the first of a stack of experts'."""
        return Lora(
            r=self.peft.rank_of(spec.name),
            scaling=self.peft.scaling_of(spec.name),
            dropout=self.dropout,
            key=zlib.crc32(spec.name.encode()),
            a=self._matrix(self.parameters, spec, LORA_A, stack),
            b=self._matrix(self.parameters, spec, LORA_B, stack),
            grad_a=self._matrix(self.gradient, spec, LORA_A, stack),
            grad_b=self._matrix(self.gradient, spec, LORA_B, stack),
            a_stride=self._stride(LORA_A, stack),
            b_stride=self._stride(LORA_B, stack),
            magnitude=self._magnitude(self.parameters, spec),
            grad_magnitude=self._magnitude(self.gradient, spec),
        )

    def embedding_pair(self, name: str) -> Lora:
        """The embedding's pair."""
        (a, b), (grad_a, grad_b) = (
            [self._window(flat, name, leaf) for leaf in (EMBEDDING_A, EMBEDDING_B)]
            for flat in (self.parameters, self.gradient)
        )
        rank, scaling = self.peft.rank_of(name), self.peft.scaling_of(name)
        return Lora(rank, scaling, 0.0, 0, a, b, grad_a, grad_b)

    def rows(self, module: str, indices: Sequence[int], vocabulary: Vocabulary) -> TrainedRows:
        """Trained rows of the embedding or of a head."""
        rows, gradient = (
            self._window(flat, module, TOKENS) for flat in (self.parameters, self.gradient)
        )
        padding = vocabulary.padding if module == vocabulary.embedding else None
        return TrainedRows(module, tuple(indices), rows, gradient, vocabulary.rows, padding)

    def whole(self, module: str, vocabulary: Vocabulary) -> TrainedMatrix:
        """An embedding or a head that is trained whole."""
        rows, gradients = (
            tuple(self._row_pieces(flat, module)) for flat in (self.parameters, self.gradient)
        )
        padding = vocabulary.padding if module == vocabulary.embedding else None
        return TrainedMatrix(module, rows, gradients, padding)

    def _place(self, module: str, leaf: str) -> Place:
        return self.flat[tensor_name(module, leaf)]

    def _matrix(
        self, flat: Pieces, spec: LinearSpec, leaf: str, stack: ExpertSpec | None
    ) -> Tensor:
        """A or B within a flat vector, with the other experts' up to the last."""
        place = self._place(spec.name, leaf)
        rows = place.rows
        if stack is not None:
            others = (stack.experts - 1) * self._stride(leaf, stack)
            rows += ceil_div(others, padded(place.columns))
        return self._window(flat, spec.name, leaf, rows)

    def _window(self, flat: Pieces, module: str, leaf: str, rows: int | None = None) -> Tensor:
        """A matrix within a flat vector; with ``rows``, as many from its first on."""
        place = self._place(module, leaf)
        piece, first = flat.find(place.offset)
        offset = ITEM_SIZE[flat.dtype] * first
        name, rows = f"{module}.{leaf}", place.rows if rows is None else rows
        return matrix(name, rows, place.columns, flat.dtype, piece.storage, offset)

    def _row_pieces(self, flat: Pieces, module: str) -> Iterator[tuple[int, Tensor]]:
        """``(first row, rows)`` of a whole matrix, which may go through several pieces."""
        place = self._place(module, WHOLE)
        stride = place.size // place.rows
        for begin, piece in flat.numbered():
            first = max(begin, place.offset)
            count = (min(begin + piece.columns, place.offset + place.size) - first) // stride
            if count > 0:
                name, offset = f"{module}.{WHOLE}", ITEM_SIZE[flat.dtype] * (first - begin)
                rows = matrix(name, count, place.columns, flat.dtype, piece.storage, offset)
                yield (first - place.offset) // stride, rows

    def _stride(self, leaf: str, stack: ExpertSpec | None) -> int:
        """Floats from one expert's A or B to the next one's."""
        if stack is None or stack.experts == 1:
            return 0
        first, second = (self._place(spec.name, leaf).offset for spec in stack.linears[:2])
        return second - first

    def _magnitude(self, flat: Pieces, spec: LinearSpec) -> Tensor | None:
        if not self.use_dora:
            return None
        place = self._place(spec.name, MAGNITUDE)
        piece, first = flat.find(place.offset)
        name, offset = f"{spec.name}.{MAGNITUDE}", ITEM_SIZE[flat.dtype] * first
        return row(name, place.columns, flat.dtype, piece.storage, offset)
