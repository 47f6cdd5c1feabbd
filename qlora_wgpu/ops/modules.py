"""The parts of a model as ops see them: matrices in shards of rows, and linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.mapped_files import require_whole
from qlora_wgpu.ops.tensor import copied
from qlora_wgpu.ops.trained import SavedModule, TrainableTokens, overwrite


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

    rows: int  # its rows
    columns: int  # its columns
    pieces: tuple[tuple[int, Tensor], ...]  # ``(first row, operand tensor)``
    # The rows that are trained, which overwrite theirs before a forward
    trained: TrainableTokens | None = None
    whole: SavedModule | None = None  # all of it, where all is trained, likewise

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Yields the resident pieces."""
        yield from self.pieces


@dataclass(eq=False)
class HostEmbedding:
    """A matrix in host memory, of which rows are uploaded with each micro-batch."""

    rows: int  # its rows
    columns: int  # its columns
    dtype: str  # element type of what is uploaded
    # (rows, padded columns), bfloat16 as uint16, once it is read
    values: npt.NDArray[Any] | None = None
    as_stored: bool = False  # whether these are a file's own bytes, of which no copy is made
    # The rows that are trained, which take the place of what is looked up
    trained: TrainableTokens | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return matrix("", self.rows, self.columns, self.dtype).nbytes

    def taken(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        """Rows (len(ids), padded columns)."""
        assert self.values is not None
        require_whole(self.values)
        rows: npt.NDArray[Any] = self.values[ids]
        return rows


@dataclass(frozen=True)
class StreamedMatrix:
    """A matrix in host memory that comes to the device in blocks of rows, one after the other."""

    rows: int  # its rows
    columns: int  # its columns
    # ``(first row, operand tensor)``, each the storage of a section of its own
    blocks: tuple[tuple[int, Tensor], ...]
    host: HostEmbedding  # all of it

    @property
    def trained(self) -> TrainableTokens | None:
        """The rows that are trained, which overwrite those of a block when it has come."""
        return self.host.trained

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Yields the blocks."""
        for row0, block in self.blocks:
            yield row0, self.brought(g, row0, block)

    def brought(self, g: Graph, row0: int, block: Tensor) -> Tensor:
        """A block for the launches that follow at once: in a texture where they want it there.

        A copy that the layout pass makes would be kept for whoever reads the block again.
        """
        if self.trained is not None:
            overwrite(g, self.trained, [(row0, block)])
        return copied(g, block) if g.profile.textures else block


def trained_whole(weight: Matrix | HostEmbedding) -> SavedModule | None:
    """An embedding or a head as a parameter, if all of it is trained."""
    return weight.whole if isinstance(weight, DenseMatrix) else None


def trained_rows(weight: Matrix | HostEmbedding) -> TrainableTokens | None:
    """The rows of an embedding or a head that are trained, if any are."""
    if isinstance(weight, DenseMatrix | HostEmbedding | StreamedMatrix):
        return weight.trained
    return None


@dataclass(frozen=True)
class Linear:
    """A frozen linear layer with its optional bias and adapter."""

    name: str
    weight: Matrix
    bias: Tensor | None
    lora: Lora | None


class ExpertMatrix(Protocol):
    """Frozen matrices (out_features, in_features) of many experts."""

    @property
    def experts(self) -> int:
        """Number of experts."""

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
    """A frozen linear layer of each expert."""

    name: str  # what all of them are called together
    weight: ExpertMatrix  # their matrices
    lora: Lora | None  # the first expert's adapter, if they are adapted
    bias: Tensor | None = None  # (experts, out_features) float32, if they have biases


@dataclass(frozen=True)
class Head:
    """``lm_head`` and what its logits go through."""

    matrix: Matrix  # (vocab_size, hidden_size)
    scale: float = 1.0  # factor of the product, and of the pair's
    softcap: float | None = None  # logits z become softcap · tanh(z / softcap), if given
    lora: Lora | None = None  # its adapter, if it has one
    # What is added to the logits before they are capped, float32, if anything
    bias: Tensor | None = None

    @property
    def pair(self) -> Lora | None:
        """Its adapter with the factor in its scaling."""
        if self.lora is None:
            return None
        return replace(self.lora, scaling=self.scale * self.lora.scaling)
