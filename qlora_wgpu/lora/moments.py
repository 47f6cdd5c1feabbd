"""AdamW's moments of an adapter: their places on the device, and their tensors in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.lora.flat_vector import FlatVector
from qlora_wgpu.lora.forms import AdapterForms
from qlora_wgpu.ops.moments_8bit import BlockTable, Span
from qlora_wgpu.quant.codebooks import dynamic_quant_map

Array = npt.NDArray[Any]
MOMENT_VALUES = (dynamic_quant_map(), dynamic_quant_map(signed=False))
_LABELS = ("exp_avg", "exp_avg_sq")


class Moments(ABC):
    """Both moments.

    Attributes:
        first: m.
        second: v.
        blocks: Where each tensor's blocks lie, in 8 bits.
    """

    first: Tensor
    second: Tensor
    blocks: BlockTable | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.first.nbytes + self.second.nbytes

    @property
    def nbytes_beside(self) -> int:
        """Bytes on the device beside them, wherever they are."""
        return 0 if self.blocks is None else self.blocks.table.nbytes

    def zeros(self) -> Array:
        """One of them before the first step."""
        return np.zeros(self.first.columns, self.first.dtype)

    @abstractmethod
    def split(self, values: Sequence[Array]) -> dict[str, Array]:
        """Their tensors by name, as a checkpoint keeps them, from what the device holds."""

    @abstractmethod
    def join(self, tensors: Mapping[str, Array]) -> list[Array]:
        """What the device holds, from a checkpoint's tensors.

        Raises:
            CheckpointError: If a tensor is missing, unknown, of another shape or not finite.
        """


class Float32Moments(Moments):
    """Two flat vectors of the adapter's layout."""

    def __init__(self, flat: FlatVector, length: int) -> None:
        """Gives them their places.

        Args:
            flat: The adapter's layout.
            length: Length of its vectors, in floats.
        """
        self._flat, self._length = flat, length
        self.first, self.second = (
            vector(
                label, length, "float32", Storage(label, "optimizer", 4 * length, in_windows=True)
            )
            for label in ("first moment", "second moment")
        )

    def split(self, values: Sequence[Array]) -> dict[str, Array]:
        """Their tensors, as PyTorch's AdamW names them before the adapter's names."""
        return {
            f"{label}.{name}": array
            for label, flat in zip(_LABELS, values, strict=True)
            for name, array in self._flat.split(flat).items()
        }

    def join(self, tensors: Mapping[str, Array]) -> list[Array]:
        """Two flat vectors."""
        return [
            self._flat.join(
                {n.removeprefix(f"{x}."): a for n, a in tensors.items() if n.startswith(f"{x}.")},
                self._length,
            )
            for x in _LABELS
        ]


class EightBitMoments(Moments):
    """Blocks of codes, as bitsandbytes has them."""

    def __init__(self, flat: FlatVector) -> None:
        """Gives them their places.

        Args:
            flat: The adapter's layout.
        """
        self._names, spans = list(flat), []
        for name in self._names:
            place = flat[name]
            rows = max(place.rows, 1)
            spans.append(Span(place.offset, rows, place.columns, place.size // rows))
        self.blocks = BlockTable(spans, MOMENT_VALUES)
        self.first, self.second = (
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
        """Two vectors of words."""
        assert self.blocks is not None
        values = [self.zeros(), self.zeros()]
        by_name: dict[str, dict[str, Array]] = {}
        for key, array in tensors.items():
            part, _, name = key.partition(".")
            by_name.setdefault(name, {})[part] = array
        if unknown := sorted(set(by_name) - set(self._names)):
            raise CheckpointError(f"the optimizer has {unknown[0]!r}, which this model has not")
        for name, tensor in zip(self._names, self.blocks.tensors, strict=True):
            own = by_name.get(name, {})
            try:
                for number, words in enumerate(values, start=1):
                    tensor.join(words, number, own)
            except CheckpointError as err:
                raise CheckpointError(f"{name}: {err}") from err
        return values


def moments_of(flat: FlatVector, length: int, forms: AdapterForms) -> Moments:
    """An adapter's moments in the form that its optimizer keeps them in."""
    if forms.optimizer == "adamw_8bit":
        return EightBitMoments(flat)
    return Float32Moments(flat, length)
