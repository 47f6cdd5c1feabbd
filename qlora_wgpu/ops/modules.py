"""What a model is made of, as ops see it: matrices in shards of rows, and linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor


class Matrix(Protocol):
    """A frozen matrix (out_features, in_features), however it is stored."""

    @property
    def rows(self) -> int:
        """out_features."""

    @property
    def columns(self) -> int:
        """in_features."""

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Yields ``(first row, operand tensor)`` pieces, each within one binding.

        Adds the launches that a piece needs just before it is yielded.
        """


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix kept as matmul operands on the device."""

    rows: int
    columns: int
    pieces: tuple[tuple[int, Tensor], ...]

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Yields the resident pieces."""
        yield from self.pieces


@dataclass(frozen=True)
class Lora:
    """One adapter pair, float32 windows of the flat buffers.

    Attributes:
        r: Its rank.
        scaling: What the product is multiplied by.
        dropout: Probability that an element of its input is dropped.
        key: Tells its dropout masks from those of other modules.
        a: (r, in_features).
        b: (out_features, r).
        grad_a: Gradient of ``a``, summed up.
        grad_b: Gradient of ``b``, summed up.
        a_stride: Floats from one expert's ``a`` to the next one's.
        b_stride: The same of ``b``.
        magnitude: DoRA's, (out_features) float32, if it is one.
        grad_magnitude: Its gradient, summed up.
    """

    r: int
    scaling: float
    dropout: float
    key: int
    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    a_stride: int = 0
    b_stride: int = 0
    magnitude: Tensor | None = None
    grad_magnitude: Tensor | None = None


@dataclass(frozen=True)
class Linear:
    """A frozen linear layer with its optional bias and adapter."""

    name: str
    weight: Matrix
    bias: Tensor | None
    lora: Lora | None


EXPERT_TILE = 64  # rows of one expert; a multiple of what any product's workgroup makes


@dataclass(frozen=True)
class ExpertTiles:
    """Which expert each tile of ``EXPERT_TILE`` rows belongs to, and whose weights are at hand.

    Attributes:
        experts: uint32 (tiles).
        rows: uint32 (2 · experts), the first row of each expert and the one past its last.
        first: The first expert at hand.
        count: How many are.
    """

    experts: Tensor
    rows: Tensor
    first: int
    count: int


class ExpertMatrix(Protocol):
    """Frozen matrices (out_features, in_features) of many experts."""

    @property
    def experts(self) -> int:
        """How many."""

    @property
    def rows(self) -> int:
        """out_features of one."""

    @property
    def columns(self) -> int:
        """in_features."""

    def expert_shards(self, g: Graph) -> Iterator[tuple[int, int, Tensor]]:
        """Yields ``(first expert, count, operand tensor)``, the experts one below the other.

        Adds the launches that a piece needs just before it is yielded.
        """


@dataclass(frozen=True)
class DenseExperts:
    """Experts' matrices kept as matmul operands on the device."""

    experts: int
    rows: int
    columns: int
    pieces: tuple[tuple[int, int, Tensor], ...]

    def expert_shards(self, g: Graph) -> Iterator[tuple[int, int, Tensor]]:
        """Yields the resident pieces."""
        yield from self.pieces


@dataclass(frozen=True)
class ExpertLinear:
    """A frozen linear layer of each expert; ``lora`` is the first expert's."""

    name: str
    weight: ExpertMatrix
    lora: Lora | None


@dataclass(frozen=True)
class Head:
    """``lm_head`` and what its logits go through.

    Attributes:
        matrix: (vocab_size, hidden_size).
        scale: Of the product.
        softcap: Logits z become softcap · tanh(z / softcap), if given.
    """

    matrix: Matrix
    scale: float = 1.0
    softcap: float | None = None
