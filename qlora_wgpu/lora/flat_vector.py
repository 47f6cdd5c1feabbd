"""One flat vector for all of an adapter's tensors: their places and their types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.tensor import padded, round_up
from qlora_wgpu.lora.peft_names import Float32Array

OptimizerKind = Literal["adamw", "adamw_8bit", "lion"]


@dataclass(frozen=True)
class AdapterDtypes:
    """Element types of gradient and moments; they change results, so the user alone chooses."""

    optimizer: OptimizerKind = "adamw"  # its moments are float32, except for adamw_8bit
    # The type that micro-batches' gradients, computed in float32, are summed in.
    gradient: Literal["float32", "bfloat16"] = "float32"
    updates: bool = True  # whether there are moments: a worker of a cluster has none

    @classmethod
    def of(cls, settings: Config) -> AdapterDtypes:
        return cls(settings.optim.name, settings.train.gradient_dtype)


FLOAT32 = AdapterDtypes()


_ALIGNMENT = 64  # floats: every tensor starts at a multiple of 256 bytes, as bindings must


def aligned(floats: int) -> int:
    """The next place where a tensor may start."""
    return round_up(floats, _ALIGNMENT)


@dataclass(frozen=True)
class Place:
    """The part of the flat vector that a tensor takes."""

    offset: int  # the tensor's first element, in floats
    rows: int  # rows of a matrix; 0 for a vector
    columns: int  # elements of a row, padding not counted

    @property
    def size(self) -> int:
        """Floats, padding of rows included."""
        return max(self.rows, 1) * padded(self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape as PEFT has it."""
        return (self.rows, self.columns) if self.rows else (self.columns,)

    def view(self, flat: Float32Array) -> Float32Array:
        values = flat[self.offset : self.offset + self.size]
        if not self.rows:
            return values[: self.columns]
        return values.reshape(self.rows, -1)[:, : self.columns]


@dataclass(frozen=True)
class Group:
    """Neighbouring tensors that kernels may read as one."""

    name: str
    always: bool = False  # whether it is never split, even if larger than a piece


def cut(sizes: Sequence[int], groups: Sequence[Group], most: int) -> list[int]:
    """The first tensors of pieces of a limited size, without that of the first piece.

    A tensor, or a group that is never split, is a piece by itself if it is larger.
    """
    cuts, taken = [], 0
    for group, run in groupby(range(len(sizes)), key=lambda index: groups[index]):
        members = list(run)
        together = group.always or sum(sizes[i] for i in members) <= most
        for unit in [members] if together else [[index] for index in members]:
            size = sum(sizes[index] for index in unit)
            if taken and taken + size > most:
                cuts.append(unit[0])
                taken = 0
            taken += size
    return cuts


class FlatVector(dict[str, Place]):
    """Places of tensors by name, one after another."""

    end = 0  # the place of the next tensor, in floats
    slack = 0  # floats behind the last one

    def append(self, name: str, rows: int, columns: int) -> None:
        self[name] = Place(self.end, rows, columns)
        self.end += aligned(self[name].size)

    @property
    def length(self) -> int:
        return self.end + self.slack

    @property
    def names(self) -> list[str]:
        return list(self)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self.items()}

    @property
    def num_parameters(self) -> int:
        """Trained numbers, padding not counted."""
        return sum(map(math.prod, self.shapes.values()))

    def split(self, flat: Float32Array) -> dict[str, Float32Array]:
        return {name: view.copy() for name, view in self.views(flat).items()}

    def views(self, flat: Float32Array) -> dict[str, Float32Array]:
        return {name: place.view(flat) for name, place in self.items()}

    def join(self, tensors: Mapping[str, Float32Array]) -> Float32Array:
        odd = sorted(set(tensors) ^ set(self))
        if odd:
            found = "is missing" if odd[0] in self else "is unknown to this model"
            raise CheckpointError(f"the adapter's {odd[0]!r} {found} ({len(odd)} such tensors)")
        flat = np.zeros(self.length, np.float32)
        for name, place in self.items():
            array = np.asarray(tensors[name])
            if array.shape != place.shape:
                raise CheckpointError(
                    f"the adapter's {name!r} has shape {array.shape}, "
                    f"this model expects {place.shape}"
                )
            if not np.isfinite(array).all():
                raise CheckpointError(f"the adapter's {name!r} contains NaN or infinity")
            place.view(flat)[:] = array
        return flat
