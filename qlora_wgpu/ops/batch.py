"""The inputs of a micro-batch, as tensors of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.tensor import Storage, Tensor, vector

INFO_LABEL_ROWS, INFO_DROPOUT, INFO_KEY, INFO_LENGTH = 0, 1, 2, 4


@dataclass(frozen=True)
class Batch:
    """What the host writes before a micro-batch; all of it is one buffer, written at once.

    Attributes:
        batch: Sequences.
        seq: Tokens of each, padding included.
        input_ids: uint32 (batch · seq).
        targets: int32 (batch · seq), the label of the token that follows.
        label_rows: uint32 (batch · seq), the rows that have a target, in front.
        positions: uint32 (batch · seq).
        segments: uint32 (batch · seq), 0 for padding, else the number of the sample in its row.
        info: uint32: label rows, whether dropout is on, the micro-batch's random key.
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

    @property
    def rows(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.batch * self.seq


def make_batch(batch: int, seq: int) -> Batch:
    """Lays out the inputs of micro-batches of ``batch`` sequences of ``seq`` tokens."""
    rows = batch * seq
    window = -(-rows * 4 // 256) * 256
    storage = Storage("a batch's inputs", "inputs", 5 * window + 256)

    def field(name: str, index: int, dtype: str = "uint32") -> Tensor:
        return vector(name, rows, dtype, storage, index * window)

    return Batch(
        batch,
        seq,
        storage,
        field("input_ids", 0),
        field("targets", 1, "int32"),
        field("label_rows", 2),
        field("positions", 3),
        field("segments", 4),
        vector("batch_info", INFO_LENGTH, "uint32", storage, 5 * window),
    )
