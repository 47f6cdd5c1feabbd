"""The inputs of a micro-batch, as tensors of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector
from qlora_wgpu.ops.kv_cache import CacheView
from qlora_wgpu.ops.modules import HostEmbedding
from qlora_wgpu.ops.quantized import PackedWeightCache

INFO_LABEL_ROWS, INFO_DROPOUT, INFO_KEY, INFO_SAMPLES, INFO_LENGTH = range(5)
_SHORTEST = 2  # tokens of a sample that has a label


class Rotation(Protocol):
    """A RoPE whose angles depend on the length of a token's sample."""

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""

    def angles(
        self, positions: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.float32]:
        """(tokens, rotary_dim / 2, 2) of (cos, sin).

        ``positions`` are (tokens), or (tokens, rotary_dim / 2) if they differ between pairs.
        """

    def is_same(self, length: int, other: int) -> bool:
        """Whether samples of these two lengths are rotated alike."""


@dataclass(frozen=True)
class HostRows:
    """A row per token, written by the host with each micro-batch."""

    table: Tensor  # angles, float32 (batch · seq · rotary_dim) of (cos, sin); or a matrix's rows
    rows: Tensor  # uint32 (batch · seq): 0, 1, 2, …


@dataclass(frozen=True)
class ImageLayout:
    """How a model reads images, whose features replace the embeddings of placeholders."""

    token_id: int  # the placeholder
    # For M-RoPE, the axis of each of a head's pairs: 0 for time, 1 for height, 2 for width.
    axes: tuple[int, ...] | None = None
    deepstack: int = 0  # the number of first layers whose output further features are added to
    bidirectional: bool = False  # whether an image's tokens attend to each other
    only_sliding: bool = False  # whether they do only in layers with a sliding window
    # The token whose rows of host embeddings are looked up for placeholders; None for their own.
    stand_in: int | None = None


@dataclass
class RouterSums:
    """The sums of the routers' choices in a forward pass, for the load-balancing loss."""

    sums: Tensor | None = None  # (2, experts) float32, over the layers traced so far
    top_k: int = 0  # experts per token


@dataclass(frozen=True)
class SampleBuffers:
    """The samples of a micro-batch, for objectives over answers."""

    # uint32 (4 · capacity): first label row, one past the last, the reference's summed log
    # probability and a parameter of the objective, both as bits of float32.
    table: Tensor
    # uint32 (batch · seq): for each label row twice its sample's number, plus one if it belongs to
    # the prompt.
    of_rows: Tensor
    capacity: int  # maximum number of samples per micro-batch


@dataclass(frozen=True)
class BatchBuffers:
    """The inputs that the host writes before a micro-batch: one buffer, written at once.

    Angles that depend on samples' lengths, and rows of host embeddings, which few models need, have
    separate buffers.
    """

    batch: int  # sequences
    seq: int  # tokens of each, padding included
    storage: Storage  # of all tensors that follow
    input_ids: Tensor  # uint32 (batch · seq)
    targets: Tensor  # int32 (batch · seq), the label of the token that follows
    label_rows: Tensor  # uint32 (batch · seq), the rows that have a target, in front
    positions: Tensor  # uint32 (batch · seq)
    # uint32 (batch · seq): 0 for padding, else 1 + the position at which the token's sample begins.
    segments: Tensor
    info: Tensor  # uint32: label rows, whether dropout is on, the micro-batch's random key, samples
    cache: CacheView | None = None  # the KV cache in generation
    noise: float = 0.0  # NEFTune's α: how much noise the embedding of training batches gets
    # float32 (batch · seq), in the order of the label rows; None if all are one.
    weights: Tensor | None = None
    # Sums of the routers' choices, if requested.
    routers: RouterSums | None = field(default=None, compare=False)
    # uint32 (batch · seq), with a cache: each row's sequence.
    places: Tensor | None = None
    drops: bool = False  # whether dropout is possible, as in training batches
    # uint32 (3 · batch · seq): the segments, then begin and end, in its row, of each token's block,
    # whose later tokens it sees, too; None if attention is causal.
    blocks: Tensor | None = None
    samples: SampleBuffers | None = None  # for objectives over whole answers
    # float32 (4 · batch · seq), of each label row in their order, for objectives over completions:
    # its label's log probability when it was sampled, and by the reference; its weight; and its
    # completion's advantage.
    completions: Tensor | None = None
    # float32 (batch · width), for objectives over whole sequences: the targets of each row's.
    sequence_targets: Tensor | None = None
    angles: dict[Rotation, HostRows] = field(default_factory=dict, compare=False)
    embedded: dict[HostEmbedding, HostRows] = field(default_factory=dict, compare=False)
    images: ImageLayout | None = None  # how images are read, if the batch may have some
    # uint32 (batch · seq): for a placeholder 1 + its row of the images' features, else 0.
    image_rows: Tensor | None = None
    image_capacity: int = 0  # maximum number of placeholders
    features: dict[int, Tensor] = field(default_factory=dict, compare=False)
    # uint32 (batch · seq), in decoding: the position by which RoPE rotates each token, if sequences
    # have images after which M-RoPE does not count tokens.
    rotated: Tensor | None = None

    @property
    def rows(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.batch * self.seq

    @property
    def decodes(self) -> bool:
        """Whether each row is a new token of a cached sequence."""
        return self.cache is not None and self.seq == 1

    @property
    def packed_weights(self) -> PackedWeightCache | None:
        return None if self.cache is None else self.cache.packed_weights

    @property
    def texts(self) -> dict[str, Tensor | None]:
        """Each row's sequence and position in it, by the kernels' names."""
        return {"positions": self.positions, "places": self.places}

    @property
    def span(self) -> int:
        return self.seq if self.cache is None else self.cache.capacity

    def angles_of(self, rotation: Rotation) -> HostRows:
        """Space for a rotation's angles, written with each batch from now on."""
        if rotation not in self.angles:
            length = self.rows * rotation.rotary_dim
            self.angles[rotation] = HostRows(
                vector("angles", length, "float32", Storage("angles", "inputs", 4 * length)),
                self._row_numbers(),
            )
        return self.angles[rotation]

    def rows_of(self, weight: HostEmbedding) -> HostRows:
        """Space for the tokens' rows of a matrix, written with each batch from now on."""
        if weight not in self.embedded:
            rows = matrix("embedded rows", self.rows, weight.columns, weight.dtype)
            rows.storage = Storage("embedded rows", "inputs", rows.nbytes)
            self.embedded[weight] = HostRows(rows, self._row_numbers())
        return self.embedded[weight]

    def features_of(self, part: int, columns: int) -> Tensor:
        """Space for a part of the images' features, float32 (image_capacity, columns)."""
        if part not in self.features:
            rows = matrix("image features", self.image_capacity, columns, "float32")
            rows.storage = Storage("image features", "inputs", rows.nbytes)
            self.features[part] = rows
        return self.features[part]

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The axis of each pair of a head, if positions have several."""
        return None if self.images is None else self.images.axes

    @property
    def embedded_bytes(self) -> int:
        tables = [rows.table for rows in self.embedded.values()]
        return sum(table.nbytes for table in (*tables, *self.features.values()))

    def _row_numbers(self) -> Tensor:
        numbers = np.arange(self.rows, dtype=np.uint32)
        storage = Storage("row numbers", "tables", numbers.nbytes, numbers)
        return vector("row numbers", self.rows, "uint32", storage)


def make_batch_buffers(
    batch: int,
    seq: int,
    cache: CacheView | None = None,
    *,
    noise: float = 0.0,
    weighted: bool = False,
    routers: RouterSums | None = None,
    drops: bool = False,
    sampled: bool = False,
    blocked: bool = False,
    images: ImageLayout | None = None,
    image_rows: int = 0,
    rotated: bool = False,
    completions: bool = False,
    sequence_width: int = 0,
) -> BatchBuffers:
    rows = batch * seq
    window = -(-rows * 4 // 256) * 256
    cached = cache is not None
    blocked = blocked or (images is not None and images.bidirectional and image_rows > 0)
    before_blocks = 5 + weighted + cached + 3 * sampled
    before_images = before_blocks + 3 * blocked
    before_completions = before_images + (image_rows > 0)
    windows = before_completions + 4 * completions
    targets_at = windows * window + 256
    targets = batch * sequence_width
    storage = Storage("a batch's inputs", "inputs", targets_at + -(-targets * 4 // 256) * 256)

    def part(name: str, index: int, dtype: str = "uint32", words: int = rows) -> Tensor:
        after_info = 256 if index >= 5 else 0
        return vector(name, words, dtype, storage, index * window + after_info)

    sequence_targets = None
    if targets:
        sequence_targets = vector("targets of sequences", targets, "float32", storage, targets_at)
    samples = None
    if sampled:
        first, capacity = 5 + weighted + cached, max(rows // _SHORTEST, 1)
        offset = first * window + 256
        table = vector("samples", 4 * capacity, "uint32", storage, offset)
        samples = SampleBuffers(table, part("row_samples", first + 2), capacity)
    of_completions = None
    if completions:
        offset = before_completions * window + 256
        of_completions = vector("completions", 4 * rows, "float32", storage, offset)
    return BatchBuffers(
        batch,
        seq,
        storage,
        part("input_ids", 0),
        part("targets", 1, "int32"),
        part("label_rows", 2),
        part("positions", 3),
        part("segments", 4),
        vector("batch_info", INFO_LENGTH, "uint32", storage, 5 * window),
        cache,
        noise,
        part("weights", 5, "float32") if weighted else None,
        routers,
        part("places", 5 + weighted) if cached else None,
        drops,
        part("blocks", before_blocks, words=3 * rows) if blocked else None,
        samples,
        of_completions,
        sequence_targets,
        images=images,
        image_rows=part("image_rows", before_images) if image_rows else None,
        image_capacity=image_rows,
        rotated=vector("rotated", rows, "uint32", Storage("rotated", "inputs", 4 * rows))
        if rotated
        else None,
    )
