"""The optimizer's moments: their places on the device, and their tensors in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.lora.flat_vector import AdapterDtypes, FlatVector, Place
from qlora_wgpu.ops.moments import BlockTable, Span, TensorMoments
from qlora_wgpu.quant.quantized_weight import dynamic_quant_map

Array = npt.NDArray[Any]
MOMENT_VALUES = (dynamic_quant_map(), dynamic_quant_map(signed=False))
_LABELS = ("exp_avg", "exp_avg_sq")


class Moments(ABC):
    """An optimizer's moments."""

    vectors: tuple[ShardedVector, ...]  # AdamW's m and v; Lion's m alone
    blocks: BlockTable | None = None  # each tensor's blocks, for 8-bit moments

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.vectors)

    @property
    def nbytes_beside(self) -> int:
        """Bytes that stay on the device even if the moments are offloaded."""
        return 0 if self.blocks is None else self.blocks.table.nbytes

    @property
    def piece_lengths(self) -> list[int]:
        """Words of each piece of one of them."""
        return [piece.columns for piece in self.vectors[0].shards]

    def zeros(self) -> Array:
        first = self.vectors[0]
        return np.zeros(first.columns, first.dtype)

    @abstractmethod
    def split(self, values: Sequence[Array]) -> dict[str, Array]:
        """The device's vectors as tensors by name, as in a checkpoint; they may be views."""

    @abstractmethod
    def join(self, tensors: Mapping[str, Array]) -> list[Array]:
        """The device's vectors, from a checkpoint's tensors."""


class Float32Moments(Moments):
    """Float32 vectors of the adapter's layout: AdamW's two, or Lion's one."""

    def __init__(self, flat: FlatVector, cuts: Sequence[int] = (), count: int = 2) -> None:
        self._labels = _LABELS[:count]
        self._flat = flat
        lengths = [end - begin for begin, end in pairwise([0, *cuts, flat.length])]
        self.vectors = tuple(
            ShardedVector.laid_out(label, "optimizer", "float32", lengths)
            for label in ("first moment", "second moment")[:count]
        )

    def split(self, values: Sequence[Array]) -> dict[str, Array]:
        """Their tensors, as PyTorch's optimizers name them before the adapter's names."""
        return {
            f"{label}.{name}": array
            for label, flat in zip(self._labels, values, strict=True)
            for name, array in self._flat.views(flat).items()
        }

    def join(self, tensors: Mapping[str, Array]) -> list[Array]:
        return [
            self._flat.join(
                {n.removeprefix(f"{x}."): a for n, a in tensors.items() if n.startswith(f"{x}.")}
            )
            for x in self._labels
        ]


class EightBitMoments(Moments):
    """Blocks of codes, as bitsandbytes has them."""

    def __init__(self, flat: FlatVector, cuts: Sequence[int] = ()) -> None:
        self._names = list(flat)
        spans = [_span(flat[name]) for name in self._names]
        self.blocks = BlockTable(spans, MOMENT_VALUES, cuts)
        self.vectors = tuple(
            self.blocks.new_moment(label) for label in ("first moment", "second moment")
        )

    def split(self, values: Sequence[Array]) -> dict[str, Array]:
        """Their tensors, as bitsandbytes names them before the adapter's names."""
        assert self.blocks is not None
        return {
            f"{part}.{name}": array
            for name, tensor in zip(self._names, self.blocks.tensors, strict=True)
            for number, words in enumerate(values, start=1)
            for part, array in tensor.split(words, number).items()
        }

    def join(self, tensors: Mapping[str, Array]) -> list[Array]:
        assert self.blocks is not None
        values = [self.zeros(), self.zeros()]
        by_name: dict[str, dict[str, Array]] = {}
        for key, array in tensors.items():
            part, _, name = key.partition(".")
            by_name.setdefault(name, {})[part] = array
        if unknown := sorted(set(by_name) - set(self._names)):
            raise CheckpointError(f"the optimizer's {unknown[0]!r} is unknown to this model")
        for name, tensor in zip(self._names, self.blocks.tensors, strict=True):
            own = by_name.get(name, {})
            try:
                for number, words in enumerate(values, start=1):
                    tensor.join(words, number, own)
            except CheckpointError as err:
                raise CheckpointError(f"{name}: {err}") from err
        return values


def _span(place: Place) -> Span:
    rows = max(place.rows, 1)
    return Span(place.offset, rows, place.columns, place.size // rows)


def most_words(place: Place) -> int:
    """Words of a tensor's moment in its largest form."""
    tensor = TensorMoments(_span(place), 0, 0)
    return max(place.size, tensor.blocks * tensor.block_words)


def moments_of(flat: FlatVector, forms: AdapterDtypes, cuts: Sequence[int] = ()) -> Moments:
    if forms.optimizer == "adamw_8bit":
        return EightBitMoments(flat, cuts)
    return Float32Moments(flat, cuts, count=1 if forms.optimizer == "lion" else 2)
