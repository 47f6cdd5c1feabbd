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
from qlora_wgpu.ops.trained import TrainedMatrix, TrainedRows, overwrite


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
    """A matrix kept as matmul operands on the device.

    Attributes:
        rows: Its rows.
        columns: Its columns.
        pieces: ``(first row, operand tensor)``.
        trained: The rows that are trained, which overwrite theirs before a forward.
        whole: All of it, where all is trained, likewise.
    """

    rows: int
    columns: int
    pieces: tuple[tuple[int, Tensor], ...]
    trained: TrainedRows | None = None
    whole: TrainedMatrix | None = None

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Yields the resident pieces."""
        yield from self.pieces


@dataclass(eq=False)
class HostMatrix:
    """A matrix in host memory, of which rows are uploaded with each micro-batch.

    Attributes:
        rows: Its rows.
        columns: Its columns.
        dtype: Element type of what is uploaded.
        values: (rows, padded columns), bfloat16 as uint16, once it is read.
        as_stored: Whether these are a file's own bytes, of which no copy is made.
        trained: The rows that are trained, which take the place of what is looked up.
    """

    rows: int
    columns: int
    dtype: str
    values: npt.NDArray[Any] | None = None
    as_stored: bool = False
    trained: TrainedRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return matrix("", self.rows, self.columns, self.dtype).nbytes

    def taken(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        """Rows (len(ids), padded columns).

        Raises:
            WeightFileError: If the file that they are in was cut.
        """
        assert self.values is not None
        require_whole(self.values)
        rows: npt.NDArray[Any] = self.values[ids]
        return rows


@dataclass(frozen=True)
class StreamedMatrix:
    """A matrix in host memory that comes to the device in blocks of rows, one after the other.

    Attributes:
        rows: Its rows.
        columns: Its columns.
        blocks: ``(first row, operand tensor)``, each the storage of a section of its own.
        host: All of it.
    """

    rows: int
    columns: int
    blocks: tuple[tuple[int, Tensor], ...]
    host: HostMatrix

    @property
    def trained(self) -> TrainedRows | None:
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


def trained_whole(weight: Matrix | HostMatrix) -> TrainedMatrix | None:
    """An embedding or a head as a parameter, if all of it is trained."""
    return weight.whole if isinstance(weight, DenseMatrix) else None


def trained_rows(weight: Matrix | HostMatrix) -> TrainedRows | None:
    """The rows of an embedding or a head that are trained, if any are."""
    if isinstance(weight, DenseMatrix | HostMatrix | StreamedMatrix):
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
    """A frozen linear layer of each expert.

    Attributes:
        name: What all of them are called together.
        weight: Their matrices.
        lora: The first expert's adapter, if they are adapted.
        bias: (experts, out_features) float32, if they have biases.
    """

    name: str
    weight: ExpertMatrix
    lora: Lora | None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Head:
    """``lm_head`` and what its logits go through.

    Attributes:
        matrix: (vocab_size, hidden_size).
        scale: Factor of the product, and of the pair's.
        softcap: Logits z become softcap · tanh(z / softcap), if given.
        lora: Its adapter, if it has one.
        bias: What is added to the logits before they are capped, float32, if anything.
    """

    matrix: Matrix
    scale: float = 1.0
    softcap: float | None = None
    lora: Lora | None = None
    bias: Tensor | None = None

    @property
    def pair(self) -> Lora | None:
        """Its adapter with the factor in its scaling."""
        if self.lora is None:
            return None
        return replace(self.lora, scaling=self.scale * self.lora.scaling)
