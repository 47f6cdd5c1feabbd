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
    """

    r: int
    scaling: float
    dropout: float
    key: int
    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor


@dataclass(frozen=True)
class Linear:
    """A frozen linear layer with its optional bias and adapter."""

    name: str
    weight: Matrix
    bias: Tensor | None
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
