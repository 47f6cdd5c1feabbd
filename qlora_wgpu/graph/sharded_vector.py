"""A long vector in several storages, where one would be larger than a binding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.graph.tensor import ITEM_SIZE, Storage, Tensor, vector


@dataclass(frozen=True, eq=False)
class ShardedVector:
    """A vector in pieces: its elements are those of one piece after those of another."""

    pieces: tuple[Tensor, ...]  # vectors, each with a storage of its own

    @classmethod
    def laid_out(
        cls, label: str, kind: str, dtype: str, lengths: Sequence[int], slack: int = 0
    ) -> ShardedVector:
        """A vector cut into such lengths."""
        pieces = []
        for number, length in enumerate(lengths):
            room = length + slack * (number < len(lengths) - 1)
            storage = Storage(label, kind, ITEM_SIZE[dtype] * room)
            pieces.append(vector(label, length, dtype, storage))
        return cls(tuple(pieces))

    @property
    def dtype(self) -> str:
        """Element type."""
        return self.pieces[0].dtype

    @property
    def columns(self) -> int:
        """Number of elements."""
        return sum(piece.columns for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def whole(self) -> Tensor:
        """The vector, which is in one piece."""
        if len(self.pieces) > 1:
            raise GraphError(f"{self.pieces[0].name} is in {len(self.pieces)} pieces")
        return self.pieces[0]

    @property
    def storages(self) -> list[Storage]:
        """The storage of each piece."""
        return [piece.storage for piece in self.pieces if piece.storage is not None]

    def numbered(self) -> Iterator[tuple[int, Tensor]]:
        """Yields each piece behind the number of its first element."""
        lengths = (piece.columns for piece in self.pieces)
        return zip(accumulate(lengths, initial=0), self.pieces, strict=False)

    def find(self, begin: int) -> tuple[Tensor, int]:
        """The piece that has an element, and that element's place in it."""
        first, piece = next(
            (first, piece)
            for first, piece in self.numbered()
            if begin < first + piece.columns or piece is self.pieces[-1]
        )
        return piece, begin - first

    def part(self, begin: int, count: int) -> Tensor:
        """So many elements that lie in one piece."""
        piece, first = self.find(begin)
        if first + count > piece.columns:
            raise GraphError(f"{count} elements from {begin} on are not in one piece of {piece}")
        offset = piece.offset + ITEM_SIZE[piece.dtype] * first
        return replace(piece, columns=count, stride=count, offset=offset)


def in_pieces(x: Tensor | ShardedVector) -> ShardedVector:
    """A vector as one in pieces, of which there may be one."""
    return x if isinstance(x, ShardedVector) else ShardedVector((x,))
