"""One dispatch of one shader."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.preprocessor import IN_PARTS, PART_FIELDS
from qlora_wgpu.gpu.wgsl import (
    Bindings,
    Constant,
    Constants,
    Measure,
    Shader,
    Workgroups,
    is_within_limits,
    load_shader,
)
from qlora_wgpu.graph.offload import OffloadedTensor
from qlora_wgpu.graph.tensor import ITEM_SIZE, TEXEL, Tensor, ceil_div


class GraphError(Exception):
    """A wrong launch or VJP: a programming error, not the user's."""


@dataclass(eq=False)
class Launch:
    """One dispatch of one shader."""

    path: str  # the shader's file
    tensors: dict[str, Tensor]  # the bound tensors, by the shader's names
    values: Mapping[str, int | float]  # the fields of the shader's uniform ``Params``
    constants: dict[str, Constant]  # appended to its source; booleans select lines
    workgroups: Workgroups  # along x, y, z
    label: str  # for timing tables
    flops: int  # floating-point operations of products
    # Where inputs start that are windows of a texture's copy.
    first_texels: dict[str, int] = field(default_factory=dict)
    # The outputs that the host downloads after it, by the shader's names.
    saves: Mapping[str, OffloadedTensor] = field(default_factory=dict)
    # The inputs that the host uploads before it, by the shader's names.
    fetches: Mapping[str, OffloadedTensor] = field(default_factory=dict)
    times: int = 1  # the launches that it stands for, in a graph traced for its sizes
    repeats: bool = False  # whether it repeats an earlier launch with other tensors
    shader: Shader = field(init=False)  # the variant for the bound tensors
    params: bytes = field(init=False)  # the uniform's bytes

    def __post_init__(self) -> None:
        """Selects the shader's variant for the bound tensors, and checks them."""
        if not is_within_limits(self.workgroups):
            raise OutOfMemoryError(
                f"{self.label} has more elements than kernels support: lower the batch size or "
                "data.max_seq_length"
            )
        bound = tuple([(n, t.dtype, t.texture) for n, t in self.tensors.items()])
        self.shader = load_shader(self.path, *_sorted(tuple(self.constants.items()), bound))
        sizes = {
            name: measured(self.tensors.get(measure.binding), measure)
            for name, measure in self.shader.measures.items()
            if name not in self.values
        }
        self.values = {**sizes, **self.values}
        self._check()
        self._pack()

    specialize = __post_init__  # again, after bindings have changed

    @property
    def kernel(self) -> str:
        """Its family of kernels: the shader's folder."""
        return self.path.partition("/")[0]

    def _pack(self) -> None:
        texels = {
            f"first_texel_{name}": self.first_texels.get(name, tensor.first_texel)
            for name, tensor in self.tensors.items()
            if tensor.texture and not self.shader.bindings[name].writable
        }
        try:
            self.params = (
                self.shader.pack_params({**self.values, **texels}) if self.shader.params else b""
            )
        except struct.error:
            raise OutOfMemoryError(
                f"{self.label} needs tensors with more elements than kernels support (2³²): "
                "lower the batch size or data.max_seq_length"
            ) from None

    @property
    def nbytes(self) -> int:
        """Estimates the bytes that it reads and writes: those of each bound tensor, once.

        Repeated reads and additions move more, cached data less.
        """
        whole: dict[int, int] = {}
        tables = 0
        for name, tensor in self.tensors.items():
            if self.shader.bindings[name].table:
                tables += 1
            else:
                whole[id(tensor)] = tensor.nbytes
        # At most as much of a table is accessed as the other tensors have.
        return sum(whole.values()) + tables * max(whole.values(), default=0)

    @property
    def has_parts(self) -> bool:
        return bool(self.shader.params) and math.prod(self.workgroups) > 1

    def part(self, first: Workgroups, size: Workgroups) -> Launch:
        place = dict(zip(PART_FIELDS, (*first, *self.workgroups), strict=True))
        share = math.prod(size) / math.prod(self.workgroups)
        return replace(
            self,
            values={**self.values, **place},
            constants={**self.constants, IN_PARTS: True},
            workgroups=size,
            flops=round(self.flops * share),
        )

    def repeated(
        self, tensors: Mapping[Tensor, Tensor], values: Mapping[str, int | float]
    ) -> Launch:
        """The same launch with other tensors of the same shapes, and other values of its fields."""
        again = copy(self)
        again.repeats = True
        again.tensors = {name: tensors.get(t, t) for name, t in self.tensors.items()}
        own = {name: value for name, value in values.items() if name in self.values}
        again.values = {**self.values, **own}
        again._pack()
        return again

    def accumulate(self) -> None:
        self.constants["ACCUMULATE"] = True
        self.specialize()

    def written(self) -> list[Tensor]:
        return [t for n, t in self.tensors.items() if self.shader.bindings[n].writable]

    def _check(self) -> None:
        bindings, required = self.shader.bindings, self.shader.required
        given = self.tensors.keys()
        if not required <= given <= bindings.keys():
            wrong = sorted((given - bindings.keys()) | (required - given))
            raise GraphError(f"{self.shader.label}: bindings {wrong} are missing or unknown")
        for name, tensor in self.tensors.items():
            allowed = bindings[name].dtypes
            if bindings[name].sums and self.constants.get("ACCUMULATE") is True:
                allowed = frozenset({"float32"})
            if tensor.dtype not in allowed:
                shown = " or ".join(sorted(allowed))
                raise GraphError(f"{self.shader.label}: {name} = {tensor} is not {shown}")


def measured(tensor: Tensor | None, measure: Measure) -> int:
    """A tensor's size in a shader's units; zero without a tensor."""
    if tensor is None:
        return 0
    plain = {"rows": tensor.rows, "columns": tensor.columns, "elements": tensor.stride}
    if measure.what in plain:
        return plain[measure.what]
    unit = measure.width * ITEM_SIZE[tensor.dtype] or TEXEL
    return ceil_div(tensor.nbytes, unit if measure.what == "units" else unit * tensor.rows)


@lru_cache(maxsize=1 << 14)
def _sorted(
    constants: Constants, bound: tuple[tuple[str, str, bool], ...]
) -> tuple[Constants, Bindings]:
    """A variant's constants and bindings sorted by name, for its lookup."""
    typed = ((name, Bound(dtype, texture)) for name, dtype, texture in bound)
    return tuple(sorted(constants)), tuple(sorted(typed))
