"""Optimizer moments in 8 bits, as in bitsandbytes, or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.offload import NUM_BUFFERS, OffloadedTensor
from qlora_wgpu.graph.sharded_vector import ShardedVector, as_sharded
from qlora_wgpu.graph.tensor import Storage, Tensor, ceil_div, vector

# ---- 8 bits ----------------------------------------------------------------------------------

BLOCK = 256  # elements
_CODE_WORDS = BLOCK // 4
_LEAST = 4096  # minimum elements of a tensor with 8-bit moments: bitsandbytes' min_8bit_size

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Span:
    """A tensor within the flat vectors: its rows, their length and their stride."""

    offset: int
    rows: int
    columns: int
    stride: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class TensorMoments:
    """The blocks of one tensor, the same for both moments.

    Its elements, without the padding of its rows, form blocks of 256. A block of a moment is 64
    words of four codes and a word with the float32 scale; tensors of fewer than 4,096 elements stay
    in float32, one word each.
    """

    span: Span  # the tensor
    first_block: int
    first_word: int  # offset of its first block

    @property
    def in_codes(self) -> bool:
        return self.span.elements >= _LEAST

    @property
    def blocks(self) -> int:
        """Number of blocks; the last may have fewer elements."""
        return ceil_div(self.span.elements, BLOCK)

    @property
    def block_words(self) -> int:
        return _CODE_WORDS + 1 if self.in_codes else BLOCK

    def _view(self, words: Words) -> Words:
        count = self.blocks * self.block_words
        return words[self.first_word : self.first_word + count].reshape(self.blocks, -1)

    def split(self, words: Words, number: int) -> dict[str, npt.NDArray[np.generic]]:
        """Its part of a moment, by bitsandbytes' names: ``state1`` and ``absmax1``, or 2 of v."""
        view, count = self._view(words), self.span.elements
        if not self.in_codes:
            return {f"state{number}": view.reshape(-1)[:count].view(np.float32).copy()}
        codes = np.ascontiguousarray(view[:, :_CODE_WORDS]).reshape(-1).view(np.uint8)
        scales = view[:, _CODE_WORDS].copy().view(np.float32)
        return {f"state{number}": codes[:count].copy(), f"absmax{number}": scales}

    def join(self, words: Words, number: int, parts: Mapping[str, npt.NDArray[np.generic]]) -> None:
        state = _checked(
            parts, f"state{number}", np.uint8 if self.in_codes else np.float32, self.span.elements
        )
        view = self._view(words)
        if not self.in_codes:
            view.reshape(-1)[: state.size] = state.view(np.uint32)
            return
        codes = np.zeros(self.blocks * BLOCK, np.uint8)
        codes[: state.size] = state
        view[:, :_CODE_WORDS] = codes.view(np.uint32).reshape(self.blocks, -1)
        scales = _checked(parts, f"absmax{number}", np.float32, self.blocks)
        view[:, _CODE_WORDS] = scales.view(np.uint32)


def _checked(
    parts: Mapping[str, npt.NDArray[np.generic]], name: str, dtype: type[np.generic], size: int
) -> npt.NDArray[np.generic]:
    array = parts.get(name)
    if array is None or array.dtype != dtype or array.shape != (size,):
        raise CheckpointError(
            f"the optimizer's {name} is missing or does not have {size} {np.dtype(dtype)} numbers"
        )
    if dtype is np.float32 and not np.isfinite(array).all():
        raise CheckpointError(f"the optimizer's {name} contains NaN or infinity")
    return np.ascontiguousarray(array)


@dataclass(frozen=True)
class BlockRange:
    """Neighbouring blocks and their words within a moment; only words for float32 moments."""

    block: int  # the first one
    word: int  # offset of the first one
    end: int  # one past the last block
    end_word: int  # offset of the end


class BlockTable:
    """The blocks of all tensors, and their table for the kernel.

    Attributes:
        tensors: Each tensor's blocks, one tensor after another.
        blocks: Their number.
        words: Words of a moment.
        shards: The blocks of each shard of the flat vectors.
        table: For the kernel: the values of codes, and a row for each tensor.
    """

    def __init__(
        self,
        spans: Iterable[Span],
        values: Sequence[npt.NDArray[np.float32]],
        cuts: Sequence[int] = (),
    ) -> None:
        self.tensors: list[TensorMoments] = []
        self.blocks = self.words = 0
        for span in spans:
            tensor = TensorMoments(span, self.blocks, self.words)
            self.tensors.append(tensor)
            self.blocks += tensor.blocks
            self.words += tensor.blocks * tensor.block_words
        self.shards = self._cut(cuts)
        data = self._data(values)
        storage = Storage("moments' blocks", "optimizer", data.nbytes, data)
        self.table = vector("moments' blocks", data.size, "uint32", storage)

    def _data(self, values: Sequence[npt.NDArray[np.float32]]) -> Words:
        rows = [
            [t.first_block, t.first_word, t.span.offset, t.span.columns, t.span.stride,
             t.span.elements, t.block_words, 0]
            for t in self.tensors
        ]  # fmt: skip
        maps = [each.view(np.uint32) for each in values]
        return np.concatenate([*maps, np.array(rows, np.uint32).reshape(-1)])

    def _cut(self, cuts: Sequence[int]) -> list[BlockRange]:
        ends = [(self.blocks, self.words)]
        for cut in reversed(cuts):
            after = [tensor for tensor in self.tensors if tensor.span.offset >= cut]
            ends.append((after[0].first_block, after[0].first_word) if after else ends[-1])
        return [BlockRange(*begin, *end) for begin, end in pairwise([(0, 0), *reversed(ends)])]

    def new_moment(self, label: str) -> ShardedVector:
        lengths = [shard.end_word - shard.word for shard in self.shards]
        return ShardedVector.laid_out(label, "optimizer", "uint32", lengths)

    def cuts(self, shard: BlockRange, most: int) -> list[tuple[int, int]]:
        """Splits a shard into parts of at most ``most`` words: their first blocks and words."""
        cuts = [(shard.block, shard.word)]
        for tensor in self.tensors:
            if not shard.block <= tensor.first_block < shard.end:
                continue
            block, end = tensor.first_block, tensor.first_block + tensor.blocks
            while block < end:
                word = tensor.first_word + (block - tensor.first_block) * tensor.block_words
                room = (cuts[-1][1] + most - word) // tensor.block_words
                if room <= 0:
                    cuts.append((block, word))
                    continue
                block = min(block + room, end)
        return [*cuts, (shard.end, shard.end_word)]


# ---- host memory -----------------------------------------------------------------------------

_PART = 1 << 21  # words; a multiple of 64, so that windows may be bound


@dataclass(frozen=True)
class MomentsPart:
    """A part of all moments in host memory, and its buffers on the device."""

    shard: int  # the number of its shard
    blocks: BlockRange  # for float32, words are also floats of the adapter
    kept: tuple[OffloadedTensor, ...]  # each moment's part in host memory
    moments: tuple[Tensor, ...]  # each moment's part on the device


def moments_in_parts(
    moments: Sequence[Sequence[npt.NDArray[Any]]], blocks: BlockTable | None = None
) -> list[MomentsPart]:
    """Splits moments in host memory into parts, which are views of these arrays.

    Args:
        moments: The shards of each, in 4-byte words.
        blocks: The blocks of 8-bit moments, between which they may be split.
    """
    lengths, dtype = [len(shard) for shard in moments[0]], str(moments[0][0].dtype)
    size = _part(lengths)
    buffers = [
        [Storage("moments on their way", "staging", 4 * size) for _ in moments]
        for _ in range(NUM_BUFFERS)
    ]
    parts: list[MomentsPart] = []
    for shard, cuts in enumerate(_cuts(lengths, size, blocks)):
        first = cuts[0][1]
        for begin, end in pairwise(cuts):
            own = BlockRange(*begin, *end)
            window, count = slice(own.word - first, own.end_word - first), own.end_word - own.word
            kept = tuple(
                OffloadedTensor(
                    "moments", 4 * count, each[shard][window].view(np.uint8), lasts=True
                )
                for each in moments
            )
            turn = buffers[len(parts) % NUM_BUFFERS]
            on_device = tuple(vector("moments", count, dtype, each) for each in turn)
            parts.append(MomentsPart(shard, own, kept, on_device))
    return parts


@dataclass(frozen=True)
class UpdatedPart:
    """The tensors that one launch of an update changes."""

    begin: int  # the first element of the parameters and the gradient
    tensors: tuple[Tensor, ...]  # parameters, gradient and moments
    blocks: BlockRange | None  # for moments in 8 bits or in host memory
    kept: Mapping[str, OffloadedTensor] = field(default_factory=dict)  # moments in host memory


def updated_parts(
    parameters: Tensor | ShardedVector,
    gradient: Tensor | ShardedVector,
    moments: Sequence[Tensor | ShardedVector],
    passing: Sequence[MomentsPart],
    blocks: BlockTable | None = None,
) -> Iterator[UpdatedPart]:
    """Yields the parts: shards, or parts of moments in host memory."""
    vectors = as_sharded(parameters), as_sharded(gradient)
    begins = [begin for begin, _ in vectors[0].numbered()]
    if not passing:
        own = blocks.shards if blocks is not None else [None] * len(begins)
        shards = (each.shards for each in (*vectors, *map(as_sharded, moments)))
        yield from map(UpdatedPart, begins, zip(*shards, strict=True), own)
    for part in passing:
        count = part.moments[0].columns
        begin = part.blocks.word if blocks is None else begins[part.shard]
        of_part = [
            each.part(begin, count) if blocks is None else each.shards[part.shard]
            for each in vectors
        ]
        kept = dict(zip("mv", part.kept, strict=False))
        yield UpdatedPart(begin, (*of_part, *part.moments), part.blocks, kept)


def _cuts(
    lengths: Sequence[int], size: int, blocks: BlockTable | None
) -> Iterator[list[tuple[int, int]]]:
    """Yields each shard's parts: their first blocks and words, and the shard's end."""
    if blocks is not None:
        yield from (blocks.cuts(shard, size) for shard in blocks.shards)
        return
    for first, end in pairwise(accumulate(lengths, initial=0)):
        yield [*((0, begin) for begin in range(first, end, size)), (0, end)]


def _part(lengths: Sequence[int]) -> int:
    return min(_PART, max(lengths))


def passing_parts(lengths: Sequence[int], blocks: BlockTable | None = None) -> int:
    return sum(len(cuts) - 1 for cuts in _cuts(lengths, _part(lengths), blocks))


def transfer_bytes(lengths: Sequence[int], moments: int = 2) -> int:
    """Bytes of host memory for transfers of ``moments`` moments with these shards."""
    # Two copies of each buffer are in flight to the host.
    return 2 * passing_bytes(lengths, moments)


def passing_bytes(lengths: Sequence[int], moments: int = 2) -> int:
    """Bytes of the device buffers for ``moments`` moments with these shards."""
    size = _part(lengths)
    parts = sum(-(-length // size) for length in lengths)
    return moments * min(NUM_BUFFERS, parts) * 4 * size
