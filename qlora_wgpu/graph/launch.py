"""One dispatch of one shader, from its trace to its place in a plan."""

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
    """An op was launched or differentiated wrongly: a programming error, not a user's."""


@dataclass(eq=False)
class Launch:
    """One dispatch of one shader."""

    path: str  # the shader's file
    tensors: dict[str, Tensor]  # what is bound, by the shader's names
    values: Mapping[str, int | float]  # the fields of the shader's uniform ``Params``
    constants: dict[str, Constant]  # what is appended to its source; booleans choose its lines
    workgroups: Workgroups  # along x, y, z
    label: str  # for timing tables
    flops: int  # floating-point operations, of products only
    # Where inputs begin that are windows of a texture's copy.
    first_texels: dict[str, int] = field(default_factory=dict)
    # The outputs that the host downloads after it, by the shader's names.
    saves: Mapping[str, OffloadedTensor] = field(default_factory=dict)
    # The inputs that the host uploads before it, likewise.
    fetches: Mapping[str, OffloadedTensor] = field(default_factory=dict)
    times: int = 1  # how many launches it stands for, in a graph traced for its sizes
    repeats: bool = False  # whether it repeats an earlier launch on other tensors
    shader: Shader = field(init=False)  # the variant compiled for what is bound
    params: bytes = field(init=False)  # the uniform's bytes

    def __post_init__(self) -> None:
        """Compiles the shader's variant for what is bound, and checks that it may be."""
        if not is_within_limits(self.workgroups):
            raise OutOfMemoryError(
                f"{self.label} has more elements than kernels can count: lower the batch size or "
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

    specialize = __post_init__  # anew, once what is bound has changed

    @property
    def kernel(self) -> str:
        """The family of kernels it is of: the shader's folder."""
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
                f"{self.label} would need tensors of more elements than kernels count (2³²): "
                "lower the batch size or data.max_seq_length"
            ) from None

    @property
    def nbytes(self) -> int:
        """Estimates the bytes that it reads and writes: those of each bound tensor, once.

        What a kernel reads several times, or adds to, moves more; what stays in a cache moves less.
        """
        whole: dict[int, int] = {}
        tables = 0
        for name, tensor in self.tensors.items():
            if self.shader.bindings[name].table:
                tables += 1
            else:
                whole[id(tensor)] = tensor.nbytes
        # As much of a table is reached as there is to put it, or to take it from.
        return sum(whole.values()) + tables * max(whole.values(), default=0)

    @property
    def has_parts(self) -> bool:
        """Whether its grid may be dispatched in parts."""
        return bool(self.shader.params) and math.prod(self.workgroups) > 1

    def part(self, first: Workgroups, size: Workgroups) -> Launch:
        """The launch of a part of its grid, which computes what it would there."""
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
        """The same launch on other tensors of the same shapes, with those values that it has."""
        again = copy(self)
        again.repeats = True
        again.tensors = {name: tensors.get(t, t) for name, t in self.tensors.items()}
        own = {name: value for name, value in values.items() if name in self.values}
        again.values = {**self.values, **own}
        again._pack()
        return again

    def accumulate(self) -> None:
        """Makes it add to its output."""
        self.constants["ACCUMULATE"] = True
        self.specialize()

    def written(self) -> list[Tensor]:
        """The tensors this launch may write."""
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
    """A tensor's size as a shader counts it; zero without one."""
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
    """A variant's constants and bindings by their names, as it is looked up."""
    typed = ((name, Bound(dtype, texture)) for name, dtype, texture in bound)
    return tuple(sorted(constants)), tuple(sorted(typed))
