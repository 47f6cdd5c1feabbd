"""The parts of a model for ops: matrices in shards of rows, and linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.mapped_files import check_not_truncated
from qlora_wgpu.ops.tensor import copied
from qlora_wgpu.ops.trained import SavedModule, TrainableTokens, overwrite


class Matrix(Protocol):
    """A frozen matrix (out_features, in_features) in any storage."""

    @property
    def rows(self) -> int:
        """out_features."""

    @property
    def columns(self) -> int:
        """in_features."""

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        """Yields ``(first row, operand tensor)``, each within one binding.

        Launches that a shard needs are added just before it is yielded.
        """


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix of matmul operands on the device."""

    rows: int
    columns: int
    resident: tuple[tuple[int, Tensor], ...]  # ``(first row, operand tensor)`` of each shard
    trained: TrainableTokens | None = None  # rows that overwrite these before a forward pass
    whole: SavedModule | None = None  # the same if all rows are trained

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        yield from self.resident


@dataclass(eq=False)
class HostEmbedding:
    """A matrix in host memory, whose rows are uploaded with each micro-batch."""

    rows: int
    columns: int
    dtype: str  # element type of the uploaded rows
    values: npt.NDArray[Any] | None = None  # (rows, padded columns), bfloat16 as uint16, once read
    as_stored: bool = False  # whether the values are mapped from the model's file without a copy
    trained: TrainableTokens | None = None  # rows that overwrite the looked-up ones

    @property
    def nbytes(self) -> int:
        return matrix("", self.rows, self.columns, self.dtype).nbytes

    def taken(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        """Rows by id; ids beyond the table have the first row, as in Gemma 3n."""
        assert self.values is not None
        check_not_truncated(self.values)
        rows: npt.NDArray[Any] = self.values[np.where(ids < self.rows, ids, 0)]
        return rows


@dataclass(frozen=True)
class StreamedMatrix:
    """A matrix in host memory that is streamed in blocks of rows."""

    rows: int
    columns: int
    # ``(first row, operand tensor)``, each in its own weight group.
    blocks: tuple[tuple[int, Tensor], ...]
    host: HostEmbedding  # the whole matrix

    @property
    def trained(self) -> TrainableTokens | None:
        """The trained rows, which overwrite those of an uploaded block."""
        return self.host.trained

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        for row0, block in self.blocks:
            yield row0, self.brought(g, row0, block)

    def brought(self, g: Graph, row0: int, block: Tensor) -> Tensor:
        """A block for the next launches, in a texture if they require one.

        It is copied here: a copy by the layout pass would live until the next reader.
        """
        if self.trained is not None:
            overwrite(g, self.trained, [(row0, block)])
        return copied(g, block) if g.profile.textures else block


@dataclass(frozen=True)
class ScoreHead:
    """The head of a reward model or classifier: only the adapter's own rows, in float32."""

    rows: int  # classes
    columns: int
    whole: SavedModule

    def shards(self, g: Graph) -> Iterator[tuple[int, Tensor]]:
        yield from self.whole.rows


def trained_whole(weight: Matrix | HostEmbedding) -> SavedModule | None:
    return weight.whole if isinstance(weight, DenseMatrix) else None


def trained_rows(weight: Matrix | HostEmbedding) -> TrainableTokens | None:
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
        """Yields ``(first expert, count, operand tensor)``, the experts stacked.

        Launches that a shard needs are added just before it is yielded.
        """


@dataclass(frozen=True)
class DenseExperts:
    """Experts' matrices as matmul operands on the device."""

    experts: int
    rows: int
    columns: int
    resident: tuple[tuple[int, int, Tensor], ...]  # of each shard

    def expert_shards(self, g: Graph) -> Iterator[tuple[int, int, Tensor]]:
        yield from self.resident


@dataclass(frozen=True)
class ExpertLinear:
    """A frozen linear layer of each expert."""

    name: str  # the common name
    weight: ExpertMatrix
    lora: Lora | None  # the first expert's adapter, if they are adapted
    bias: Tensor | None = None  # (experts, out_features) float32, if they have biases


@dataclass(frozen=True)
class Head:
    """``lm_head`` with its scale, bias and softcap."""

    matrix: Matrix  # (vocab_size, hidden_size)
    scale: float = 1.0  # factor of the product, and of the adapter's
    softcap: float | None = None  # logits z become softcap · tanh(z / softcap), if given
    lora: Lora | None = None
    bias: Tensor | None = None  # float32, added before the softcap

    @property
    def pair(self) -> Lora | None:
        """Its adapter, with the factor included in its scaling."""
        if self.lora is None:
            return None
        return replace(self.lora, scaling=self.scale * self.lora.scaling)
