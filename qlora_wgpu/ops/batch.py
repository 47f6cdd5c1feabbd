"""The inputs of a micro-batch, as tensors of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.ops.kv_cache import CacheView

INFO_LABEL_ROWS, INFO_DROPOUT, INFO_KEY, INFO_PAST, INFO_LENGTH = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class BatchBuffers:
    """The inputs that the host writes before a micro-batch: one buffer, written at once.

    Attributes:
        batch: Sequences.
        seq: Tokens of each, padding included.
        input_ids: uint32 (batch · seq).
        targets: int32 (batch · seq), the label of the token that follows.
        label_rows: uint32 (batch · seq), the rows that have a target, in front.
        positions: uint32 (batch · seq).
        segments: uint32 (batch · seq), 0 for padding, else one more than where the token's sample
            begins in its row.
        info: uint32: label rows, whether dropout is on, the micro-batch's random key, tokens in the
            cache.
        cache: Where keys and values are kept while text is generated.
        noise: NEFTune's α: how much noise the embedding of training batches gets.
    """

    batch: int
    seq: int
    storage: Storage
    input_ids: Tensor
    targets: Tensor
    label_rows: Tensor
    positions: Tensor
    segments: Tensor
    info: Tensor
    cache: CacheView | None = None
    noise: float = 0.0

    @property
    def rows(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.batch * self.seq

    @property
    def span(self) -> int:
        """Positions that its tokens may have."""
        return self.seq if self.cache is None else self.cache.capacity


def make_batch_buffers(
    batch: int, seq: int, cache: CacheView | None = None, *, noise: float = 0.0
) -> BatchBuffers:
    """Lays out the inputs of micro-batches of ``batch`` sequences of ``seq`` tokens."""
    rows = batch * seq
    window = -(-rows * 4 // 256) * 256
    storage = Storage("a batch's inputs", "inputs", 5 * window + 256)

    def field(name: str, index: int, dtype: str = "uint32") -> Tensor:
        return vector(name, rows, dtype, storage, index * window)

    return BatchBuffers(
        batch,
        seq,
        storage,
        field("input_ids", 0),
        field("targets", 1, "int32"),
        field("label_rows", 2),
        field("positions", 3),
        field("segments", 4),
        vector("batch_info", INFO_LENGTH, "uint32", storage, 5 * window),
        cache,
        noise,
    )
