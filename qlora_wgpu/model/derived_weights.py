"""Copies of weights that kernels read faster: dequantized once, or packed for software GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from qlora_wgpu.families.family import Modules
from qlora_wgpu.gpu.memory import SPARE_SHARE, machine_bytes
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import WINDOW, Storage, Tensor, matrix
from qlora_wgpu.ops.modules import ExpertMatrix, Matrix
from qlora_wgpu.ops.quantized import QuantizedMatrix

KIND = "dequantized weights"
"""Their kind in the memory plan."""

# ---- dequantized -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DequantizedWeights:
    """Keeps quantized matrices dequantized in addition to their codes, bit-identical to a step's.

    Layers of one input are stacked, so that kernels can compute them as one product.
    """

    dtype: str  # element type of the operands
    max_binding: int  # the largest binding, in bytes
    textures: bool  # whether they are in textures

    def within(self, modules: Modules, groups: Iterable[Sequence[str]]) -> Modules:
        """The same modules, with memory for the operands of those that are not streamed."""
        linears, experts = dict(modules.linears), dict(modules.experts)
        for names in groups:
            staying = [name for name in names if stays(linears[name].weight)]
            weights = [w for w in (linears[name].weight for name in staying) if stays(w)]
            for name, weight in zip(staying, self._of_group(weights), strict=True):
                linears[name] = replace(linears[name], weight=weight)
        for name, stack in experts.items():
            own = stack.weight
            if stays(own):
                cut = own.expert_cuts(self.dtype, self.max_binding)
                kept = tuple((first, self._own(own, count * own.rows)) for first, count in cut)
                experts[name] = replace(stack, weight=replace(own, kept=kept))
        return replace(modules, linears=linears, experts=experts)

    def _of_group(self, weights: list[QuantizedMatrix]) -> Iterator[QuantizedMatrix]:
        wholes = [matrix(w.name, w.rows, w.columns, self.dtype) for w in weights]
        total = sum(whole.nbytes for whole in wholes)
        aligned = all(whole.nbytes % WINDOW == 0 for whole in wholes)
        if self.textures or not aligned or total > self.max_binding:
            for weight in weights:
                cut = weight.row_cuts(self.dtype, self.max_binding)
                kept = tuple((row0, self._own(weight, rows)) for row0, rows in cut)
                yield replace(weight, kept=kept)
            return
        storage = Storage("·".join(weight.name for weight in weights), KIND, total)
        begin = 0
        for weight, whole in zip(weights, wholes, strict=True):
            piece = replace(whole, storage=storage, offset=begin)
            begin += whole.nbytes
            yield replace(weight, kept=((0, piece),))

    def _own(self, weight: QuantizedMatrix, rows: int) -> Tensor:
        nbytes = matrix("", rows, weight.columns, self.dtype).nbytes
        storage = Storage(weight.name, KIND, nbytes, texture=self.textures)
        return matrix(weight.name, rows, weight.columns, self.dtype, storage)


def stays(weight: Matrix | ExpertMatrix) -> TypeGuard[QuantizedMatrix]:
    if not isinstance(weight, QuantizedMatrix):
        return False
    storage = weight.codes.storage
    return storage is not None and storage.whole.group is None


def quantized(modules: Modules) -> Iterator[QuantizedMatrix]:
    # Layers may share a weight.
    of_layers = {id(layer.weight): layer.weight for layer in modules.linears.values()}
    yield from filter(stays, of_layers.values())
    of_experts = [layer.weight for layer in modules.experts.values()]
    yield from filter(stays, of_experts)


def kept_bytes(modules: Modules, dtype: str) -> int:
    """Bytes, without alignment, of everything that can be kept dequantized."""
    return sum(matrix("", w.experts * w.rows, w.columns, dtype).nbytes for w in quantized(modules))


def fill(g: Graph, modules: Modules) -> None:
    """Adds the launches that dequantize; they must run once, before all others."""
    for weight in quantized(modules):
        weight.fill(g)


# ---- packed ----------------------------------------------------------------------------------

_MOST_DENSE = 4 << 30  # bytes of linear layers that are kept dequantized
_CODE_BYTES = 0.625  # per weight as codes, with its part of a float32 scale


@dataclass(frozen=True)
class CopySizes:
    """The packed weights of a model, before they are created."""

    dense: bool  # whether quantized weights are packed dequantized, which is faster
    nbytes: int  # of all of them, estimated
    fits: bool  # whether the machine has room for them


def packed_sizes(head: int, weights: int, item_size: int) -> CopySizes:
    """Dequantized if the machine has enough memory, else as codes.

    Memory of other programs must not matter: the last digits of logits depend on this choice.
    """
    most = (machine_bytes() or 0) // SPARE_SHARE
    numbers, codes = item_size * weights, int(_CODE_BYTES * weights)
    dense = numbers <= _MOST_DENSE and head + numbers <= most
    nbytes = head + (numbers if dense else codes)
    return CopySizes(dense, nbytes, nbytes <= most)
