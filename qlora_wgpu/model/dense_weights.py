"""Weights that kernels read as numbers: norms and biases in float32, matrices as operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from qlora_wgpu.families.family import LinearSpec, stored_parts
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, pad_rows, padded, round_up, row
from qlora_wgpu.model.checkpoint_reader import WeightSource, bits_of, keep_originals
from qlora_wgpu.model.weight_placement import WeightPlaces, row_pieces
from qlora_wgpu.ops.logits import shard_rows
from qlora_wgpu.ops.modules import DenseExperts, DenseMatrix
from qlora_wgpu.ops.trained import TrainedMatrix, TrainedRows

_NO_OFFSET = np.float32(0)


@dataclass(frozen=True)
class DenseWeights:
    """Lays out what is not quantized and stays on the device, or comes with its layer.

    Attributes:
        source: The files.
        places: Where weights are kept.
        dtype: Element type of matrices, unless another one is named.
        max_binding: Largest number of bytes that one binding may show.
        head_block: Rows of a block of the head.
    """

    source: WeightSource
    places: WeightPlaces
    dtype: str
    max_binding: int
    head_block: int

    def norm(self, name: str, shape: tuple[int, ...], offset: np.float32 = _NO_OFFSET) -> Tensor:
        """A norm: a row, or a matrix of one for each head; or a number. All in whole units.

        Args:
            name: The weight's.
            shape: Its shape in the files.
            offset: Added to what the files hold.
        """
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        storage = Storage(name, "norms", 4 * rows * padded(columns))

        def load() -> None:
            parts = [self.source.read(*part) for part in stored_parts(name, shape)]
            array = np.stack(parts).reshape(rows, columns)
            self.places.fill(storage, pad_rows(array + offset))

        self.places.when_loading(name, load)
        if len(shape) > 1:
            return matrix(name, rows, columns, "float32", storage)
        return row(name, columns, "float32", storage)

    def biases(self, linears: Iterable[LinearSpec]) -> dict[str, Tensor]:
        """The biases of all layers that have one, by module name."""
        return {
            name: bias
            for specs in with_one_input(linears)
            for name, bias in self._neighbours([spec for spec in specs if spec.bias]).items()
        }

    def _neighbours(self, specs: list[LinearSpec]) -> dict[str, Tensor]:
        """Biases of layers of one input, in one storage, each where a binding may begin."""
        begins = [0]
        for spec in specs:
            begins.append(begins[-1] + round_up(padded(spec.out_features), ALIGNMENT // 4))
        storage = Storage("biases", "norms", 4 * begins[-1])
        whole = np.zeros(begins[-1], np.float32)
        missing = {spec.name for spec in specs}

        def load(spec: LinearSpec, begin: int) -> None:
            bias = self.source.read(f"{spec.name}.bias", (spec.out_features,))
            whole[begin : begin + spec.out_features] = bias
            missing.discard(spec.name)
            if not missing:
                self.places.fill(storage, whole)

        for spec, begin in zip(specs, begins, strict=False):
            self.places.when_loading(f"{spec.name}.bias", partial(load, spec, begin))
        return {
            spec.name: row(f"{spec.name}.bias", spec.out_features, "float32", storage, 4 * begin)
            for spec, begin in zip(specs, begins, strict=False)
        }

    def dense(
        self,
        name: str,
        rows: int,
        columns: int,
        dtype: str = "",
        trained: TrainedRows | None = None,
        whole: TrainedMatrix | None = None,
    ) -> DenseMatrix:
        """A matrix, in as many pieces as bindings and blocks ask for.

        Args:
            name: The weight's.
            rows: Its rows.
            columns: Its columns.
            dtype: Its element type on the device.
            trained: Its trained rows, which get to know what they are trained in place of.
            whole: It as a parameter, likewise.
        """
        dtype = dtype or self.dtype
        row_bytes = matrix("", 1, columns, dtype).nbytes
        most = shard_rows(row_bytes, self.max_binding, self.head_block)
        pieces: list[tuple[int, Tensor]] = []
        for row0, count in row_pieces(rows, most):
            storage = self.places.dense_storage(name, count * row_bytes)
            pieces.append((row0, matrix(name, count, columns, dtype, storage)))
        image = self.places.dense_image_of(name)
        self.places.expect_load(self.source.loading_bytes(name, rows, columns, dtype))
        if image is not None:
            image.as_stored &= self.source.is_as_stored(name, columns, dtype)

        def load() -> None:
            bits = self.source.read_bits(name, (rows, columns), dtype)
            keep_originals(trained, bits, columns, dtype)
            for row0, piece in pieces:
                assert piece.storage is not None
                self.places.fill(piece.storage, bits[row0 : row0 + piece.rows])

        self.places.when_loading(name, load, image)
        if whole is not None:
            whole.originals = lambda: self.source.read(name, (rows, columns))
        return DenseMatrix(rows, columns, tuple(pieces), trained, whole)

    def experts(self, name: str, rows: int, columns: int, names: list[str]) -> DenseExperts:
        """The matrices of all experts, as many together as a binding shows.

        Args:
            name: What they are called together.
            rows: Rows of each.
            columns: Columns of each.
            names: The weights' names.
        """
        one = matrix("", rows, columns, self.dtype).nbytes
        most = max(self.max_binding // one, 1)
        pieces = []
        for first in range(0, len(names), most):
            group = names[first : first + most]
            storage = self.places.dense_storage(name, len(group) * one)
            self.places.expect_load(3 * len(group) * 4 * rows * columns)
            image = self.places.dense_image_of(name)
            if image is not None:
                image.as_stored = False
            load = partial(self._load_group, storage, group, (rows, columns))
            self.places.when_loading(name, load, image)
            whole = matrix(name, len(group) * rows, columns, self.dtype, storage)
            pieces.append((first, len(group), whole))
        return DenseExperts(len(names), rows, columns, tuple(pieces))

    def _load_group(self, storage: Storage, names: list[str], shape: tuple[int, int]) -> None:
        arrays = [self.source.read(each, shape) for each in names]
        self.places.fill(storage, bits_of(names[0], np.concatenate(arrays), self.dtype))


def with_one_input(specs: Iterable[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """Neighbours of one module and as many inputs, as q, k and v are."""
    for _, some in groupby(specs, lambda s: (s.name.rpartition(".")[0], s.in_features)):
        yield list(some)
