"""A long vector in several storages, for vectors larger than a binding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.graph.tensor import ITEM_SIZE, Storage, Tensor, vector


@dataclass(frozen=True, eq=False)
class ShardedVector:
    """A vector that is the concatenation of several."""

    shards: tuple[Tensor, ...]  # each with its own storage

    @classmethod
    def laid_out(
        cls, label: str, kind: str, dtype: str, lengths: Sequence[int], slack: int = 0
    ) -> ShardedVector:
        """A vector with shards of these lengths, plus ``slack`` for all but the last."""
        shards = []
        for number, length in enumerate(lengths):
            room = length + slack * (number < len(lengths) - 1)
            storage = Storage(label, kind, ITEM_SIZE[dtype] * room)
            shards.append(vector(label, length, dtype, storage))
        return cls(tuple(shards))

    @property
    def dtype(self) -> str:
        return self.shards[0].dtype

    @property
    def columns(self) -> int:
        return sum(shard.columns for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def whole(self) -> Tensor:
        """The vector, if it has one shard."""
        if len(self.shards) > 1:
            raise GraphError(f"{self.shards[0].name} has {len(self.shards)} shards, expected one")
        return self.shards[0]

    @property
    def storages(self) -> list[Storage]:
        return [shard.storage for shard in self.shards if shard.storage is not None]

    def numbered(self) -> Iterator[tuple[int, Tensor]]:
        """Yields ``(index of the first element, shard)``."""
        lengths = (shard.columns for shard in self.shards)
        return zip(accumulate(lengths, initial=0), self.shards, strict=False)

    def find(self, begin: int) -> tuple[Tensor, int]:
        first, shard = next(
            (first, shard)
            for first, shard in self.numbered()
            if begin < first + shard.columns or shard is self.shards[-1]
        )
        return shard, begin - first

    def part(self, begin: int, count: int) -> Tensor:
        shard, first = self.find(begin)
        if first + count > shard.columns:
            raise GraphError(f"{count} elements from {begin} on are not in one shard ({shard})")
        offset = shard.offset + ITEM_SIZE[shard.dtype] * first
        return replace(shard, columns=count, stride=count, offset=offset)


def as_sharded(x: Tensor | ShardedVector) -> ShardedVector:
    return x if isinstance(x, ShardedVector) else ShardedVector((x,))
