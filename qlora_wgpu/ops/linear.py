"""Frozen linear layers with LoRA adapters: y = x·Wᵀ + bias + s·(drop(x)·Aᵀ)·Bᵀ (+ residual).

With u = s·drop(x)·Aᵀ and du = s·dy·B the gradients are dB = dyᵀ·u, dA = duᵀ·drop(x) and
dx = dy·W + mask·(du·A): the adapter costs two skinny products and an epilogue of the base's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from qlora_wgpu.gpu.limits import MOST_STORAGE_BUFFERS
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import ExpertTiles
from qlora_wgpu.kernels.dequantize import MOST_TOGETHER
from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm, PackedWeights, QuantizedView
from qlora_wgpu.kernels.lora import (
    BOTH_GRADS,
    DOWN,
    UP_GRAD,
    BothGrads,
    Lora,
    LoraA,
    LoraBGradInput,
    LoraWeightGrad,
)
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import DenseMatrix, Linear, Matrix
from qlora_wgpu.ops.pointwise import dropout_parts
from qlora_wgpu.ops.quantized import (
    PackedWeightCache,
    QuantizedMatrix,
    dequantize_together,
    kept_together,
    rows_of,
)
from qlora_wgpu.ops.tensor import as_operand, fill_zero, one_below_the_other, summed

_RANKS = 8  # processed at once by the kernels of a group's adapters


def linear(
    g: Graph,
    x: Tensor,
    layer: Linear,
    batch: BatchBuffers,
    residual: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    float32: bool = False,
) -> Tensor:
    """Applies a layer: float32 with a residual (rows, out_features) or on request, else an operand.

    ``multiplier`` is a factor of everything but the residual; a layer with a bias requires 1.
    """
    _check(x, layer, residual, multiplier)
    lora, float32 = layer.lora, float32 or residual is not None
    if lora is not None:
        lora = replace(lora, scaling=multiplier * lora.scaling)
    product = _Product((layer,), lora, batch, multiplier, layer.bias, (), residual)
    if lora is None or lora.magnitude is None:
        return product.add(g, x, [float32])[0]
    # DoRA scales the output before bias and residual are added.
    name, rows, cache = f"{layer.name}.norm", layer.weight.rows, batch.cache
    # Space for 1 / ‖W + s·B·A‖, which decoding reads as prefill left it.
    inverse = g.float_vector(name, rows) if cache is None else cache.norm(name, rows)
    scaled = replace(product, bias=None, residual=None, inverse=inverse)
    if lora.mask is not None and batch.drops:
        # As in PEFT, it scales the kept part of the input; the dropped part only passes the base.
        kept, rest = dropout_parts(g, x, lora.mask, batch)
        (residual,) = replace(product, lora=None, bias=None).add(g, rest, [True])
        x, scaled = kept, replace(scaled, lora=replace(lora, dropout=0.0))
    (z,) = scaled.add(g, x, [False])
    return dora.apply(g, z, lora, inverse, layer.bias, residual, float32=float32)


def linear_group(
    g: Graph,
    x: Tensor,
    layers: Sequence[Linear],
    batch: BatchBuffers,
    float32: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Applies up to three layers of one input that are a group (``is_group``).

    They are one product each in forward and backward: their matrices are dequantized stacked, so
    that y = x·Wᵀ and dx = Σ dy·W. The same for the thin products of their adapters, whose A and B
    are adjacent in the flat vector. Each layer has its own result, an operand or float32, adapter
    and gradients.
    """
    if not is_group(g, layers, batch) or x.columns != layers[0].weight.columns:
        raise GraphError(f"linear_group: {[layer.name for layer in layers]} of {x} are no group")
    if batch.decodes:
        layers = _without_dropout(layers)
    lora = _joined([layer.lora for layer in layers])
    bias, begins = _joined_biases([layer.bias for layer in layers])
    product = _Product(tuple(layers), lora, batch, bias=bias, bias_begins=begins)
    return product.add(g, x, float32 or [False] * len(layers))


def _check(x: Tensor, layer: Linear, residual: Tensor | None, multiplier: float) -> None:
    if multiplier != 1.0 and layer.bias is not None:
        raise GraphError(f"linear: {layer.name} has a bias, which the multiplier does not scale")
    shape = (x.rows, layer.weight.rows)
    if residual is not None and residual.shape != shape:
        raise GraphError(
            f"linear: {residual} cannot be added to {layer.name}'s {shape[0]}x{shape[1]}"
        )


@dataclass(frozen=True)
class _Product:
    """multiplier · x·Wᵀ + u·Bᵀ + bias + residual, of one layer or of a group."""

    layers: tuple[Linear, ...]
    lora: Lora | None  # with the multiplier in its scaling; for a group with the ranks of all
    batch: BatchBuffers
    multiplier: float = 1.0
    bias: Tensor | None = None  # of all layers
    bias_begins: tuple[int, ...] = ()  # where further layers' biases begin, in elements
    residual: Tensor | None = None  # of one layer
    inverse: Tensor | None = None  # DoRA's 1 / ‖W + s·B·A‖

    def add(self, g: Graph, x: Tensor, float32: Sequence[bool]) -> list[Tensor]:
        ys = [
            (g.float32 if flag else g.operand)(layer.name, x.rows, layer.weight.rows)
            for layer, flag in zip(self.layers, float32, strict=True)
        ]
        lora, few = self.lora, self.batch.decodes
        weights = [layer.weight for layer in self.layers]
        term = forward_term(g, x, lora, self.batch, few=few)
        packed = self.batch.packed_weights
        for row0, w in few_rows_operands(g, weights, packed) if few else _operands(g, weights):
            product = Gemm(
                x, w, ys[0], row0=row0, scale=self.multiplier, lora=term, bias=self.bias,
                bias_begins=self.bias_begins, residual=self.residual, others=tuple(ys[1:]),
                few=few, label="few_rows/forward" if few else "gemm/forward",
            )  # fmt: skip
            GEMM.launch(g, product)
            own = self.layers[0].lora
            if self.inverse is not None and own is not None and isinstance(w, Tensor) and not few:
                dora.norm(g, w, own, self.inverse, row0, own.scaling)
        if few:
            return ys

        def vjp(gradients: list[Tensor | None]) -> None:
            if any(dy is not None for dy in gradients):
                self._backward(g, x, term, ys, gradients)

        inputs = [x] if self.residual is None else [x, self.residual]
        grad_dtype = g.dtype if self.residual is None else None
        g.record_jointly(ys, inputs, vjp, trains=lora is not None, grad_dtype=grad_dtype)
        return ys

    def _backward(
        self,
        g: Graph,
        x: Tensor,
        forward: LoraTerm | None,
        ys: list[Tensor],
        given: list[Tensor | None],
    ) -> None:
        dys = list[Tensor]()
        for y, dy in zip(ys, given, strict=True):
            dys.append(g.operand(f"d {y.name}", *y.shape) if dy is None else as_operand(g, dy))
            if dy is None:  # an unused result
                fill_zero(g, dys[-1])
        lora, term, others = self.lora, None, tuple(dys[1:])
        if lora is not None and forward is not None:
            du = backward(g, x, forward.u, dys[0], lora, self.batch, others=others)
            term = lora.backward_term(du)
        if x.requires_grad:
            dx, rows = g.new_gradient(x), sum(layer.weight.rows for layer in self.layers)
            for row0, w in _operands(g, [layer.weight for layer in self.layers]):
                if w.rows < rows and row0 == 0:  # shards' products add up
                    dx = replace(dx, dtype="float32")
                product = Gemm(
                    dys[0], w, dx, False, row0=row0, accumulate=row0 > 0, scale=self.multiplier,
                    lora=term if row0 == 0 else None,  # part of the first shard's product
                    batch_info=self.batch.info, others=others, label="gemm/backward",
                )  # fmt: skip
                GEMM.launch(g, product)
            g.add_gradient(x, dx)
        if self.residual is not None and given[0] is not None:
            g.add_gradient(self.residual, given[0])


# -- matrices ------------------------------------------------------------------------------


def _operands(g: Graph, weights: Sequence[Matrix]) -> Iterator[tuple[int, Tensor]]:
    """Yields ``(first row, shard)`` of a matrix, or of a group's stacked matrices.

    Unless they are kept dequantized, a shard's memory is freed after the next product.
    """
    if len(weights) == 1:
        yield from weights[0].shards(g)
        return
    matrices = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    w = kept_together(matrices)
    if w is None:
        rows, name = sum(m.rows for m in matrices), "·".join(m.name for m in matrices)
        w = g.weight(name, rows, matrices[0].columns)
        dequantize_together(g, w, matrices)
    yield 0, w


def few_rows_operands(
    g: Graph, weights: Sequence[Matrix], packed: PackedWeightCache | None
) -> Iterator[tuple[int, Tensor | QuantizedView | PackedWeights]]:
    """The same for products of few rows: packed, codes, or operands."""
    whole: QuantizedView | PackedWeights | None = readable(g, weights)
    if packed is not None and (quantized := _decodable(weights)):
        whole = packed.of_quantized(g, quantized) or whole
    if whole is not None:
        yield 0, whole
        return
    first = weights[0]
    still = isinstance(first, DenseMatrix) and first.trained is None and first.whole is None
    for row0, w in _operands(g, weights):
        made = packed.of_dense(g, w) if packed is not None and still else None
        yield row0, made or w


def readable(g: Graph, weights: Sequence[Matrix]) -> QuantizedView | None:
    """Quantized matrices of one input as codes for one product, if that is possible."""
    quantized = _decodable(weights)
    return rows_of(g, quantized) if quantized else None


def _decodable(weights: Sequence[Matrix]) -> list[QuantizedMatrix]:
    quantized = [w for w in weights if isinstance(w, QuantizedMatrix) and w.experts == 1]
    return quantized if len(quantized) == len(weights) else []


# -- adapters ------------------------------------------------------------------------------


def forward_term(
    g: Graph,
    x: Tensor,
    lora: Lora | None,
    batch: BatchBuffers,
    experts: ExpertTiles | None = None,
    *,
    few: bool,
) -> LoraTerm | None:
    """u = scaling · dropout(x)·Aᵀ, and B, of one adapter or of several adjacent ones.

    ``few`` rows have no dropout and use the kernels of products of few rows.
    """
    if lora is None:
        return None
    u = g.float32("lora u", x.rows, lora.r)
    if few:
        product = Gemm(
            x, lora.a, u, scale=lora.scaling, experts=experts,
            expert_stride=0 if experts is None else lora.a_stride, few=True, label="lora/down",
        )  # fmt: skip
        GEMM.launch(g, product)
    else:
        DOWN.launch(g, LoraA(x, lora, u, batch.info, experts))
    return lora.forward_term(u)


def backward(
    g: Graph,
    x: Tensor,
    u: Tensor,
    dy: Tensor,
    lora: Lora,
    batch: BatchBuffers,
    experts: ExpertTiles | None = None,
    others: tuple[Tensor, ...] = (),
) -> Tensor:
    """Adds to the gradients of A and B, and returns du = scaling · dy·B.

    u is the forward's, (rows, r) float32. With ``experts`` each tile of rows has its expert's
    factors; ``others`` are dy of the further layers, whose ranks are adjacent in u and du.
    """
    x = g.rematerialize(x)
    du = g.float32("d lora u", x.rows, lora.r)
    UP_GRAD.launch(g, LoraBGradInput(dy, lora, du, experts, others))
    rows = experts.rows if experts is not None else None
    with summed(g, lora.grad_a) as grad_a, summed(g, lora.grad_b) as grad_b:
        of_b = LoraWeightGrad(
            dy, u, grad_b, expert_rows=rows, expert_stride=lora.b_stride, others=others
        )
        of_a = LoraWeightGrad(x, du, grad_a, True, lora.mask, batch.info, rows, lora.a_stride)
        BOTH_GRADS.launch(g, BothGrads(of_b, of_a))
    return du


# -- groups --------------------------------------------------------------------------------


def is_group(g: Graph, layers: Sequence[Linear], batch: BatchBuffers) -> bool:
    """Whether layers can be one product; others are applied one by one.

    The profile must ask for it, or the batch decode. The weights must be quantized and of one
    input, the biases, if any, in one storage, and the adapters, if any, equal in shape and
    adjacent, without DoRA and, except in decoding, without dropout.
    """
    weights = [layer.weight for layer in layers]
    rows = sum(weight.rows for weight in weights)
    if batch.decodes:
        layers = _without_dropout(layers)
    return (
        (g.profile.fused_linears or (batch.decodes and readable(g, weights) is not None))
        and 2 <= len(layers) <= MOST_TOGETHER
        and all(isinstance(weight, QuantizedMatrix) and weight.experts == 1 for weight in weights)
        and len({weight.columns for weight in weights}) == 1
        and all(weight.rows % 8 == 0 for weight in weights)
        and _biases_fit([layer.bias for layer in layers])
        and len(layers)
        <= most_layers(
            g, with_bias=layers[0].bias is not None, with_lora=layers[0].lora is not None
        )
        and g.weight("", rows, weights[0].columns).nbytes <= g.max_binding
        and _adapters_fit([layer.lora for layer in layers])
    )


def _without_dropout(layers: Sequence[Linear]) -> list[Linear]:
    return [
        layer if layer.lora is None else replace(layer, lora=replace(layer.lora, dropout=0.0))
        for layer in layers
    ]


def largest_group(g: Graph, layers: Sequence[Linear], batch: BatchBuffers) -> list[Linear]:
    """As many layers of one input as can be one product, the last preferred; or none."""
    for count in range(min(len(layers), MOST_TOGETHER), 1, -1):
        for some in reversed(list(combinations(layers, count))):
            if is_group(g, some, batch):
                return list(some)
    return []


def _biases_fit(biases: Sequence[Tensor | None]) -> bool:
    """Whether there are none, or all, adjacent in one storage."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return True
    offsets = [bias.offset for bias in present]
    storage = present[0].storage
    together = storage is not None and all(bias.storage is storage for bias in present)
    return len(present) == len(biases) and together and offsets == sorted(offsets)


def _joined_biases(biases: Sequence[Tensor | None]) -> tuple[Tensor | None, tuple[int, ...]]:
    """All biases as one tensor, and where further layers' biases begin in it."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None, ()
    first, last = present[0], present[-1]
    length = (last.offset - first.offset) // 4 + last.stride
    begins = tuple((bias.offset - first.offset) // 4 for bias in present[1:])
    return replace(first, columns=length, stride=length), begins


def most_layers(g: Graph, *, with_bias: bool, with_lora: bool) -> int:
    """Maximum number of layers of a product, by the storage buffers that its forward binds.

    These are x, w and the results, u and B, biases, and the counter of clamped values.
    """
    counted = g.profile.saturates and g.saturated is not None
    return min(MOST_TOGETHER, MOST_STORAGE_BUFFERS - 2 - 2 * with_lora - with_bias - counted)


def _adapters_fit(loras: Sequence[Lora | None]) -> bool:
    present = [lora for lora in loras if lora is not None]
    if not present:
        return True
    first = present[0]
    return (
        len(present) == len(loras)
        and all((lora.r, lora.scaling) == (first.r, first.scaling) for lora in present)
        and all(lora.mask is None and lora.magnitude is None for lora in present)
        and first.r % _RANKS == 0
        and all(part is not None and part.storage for part in _stacks(present).values())
    )


def _stacks(loras: Sequence[Lora]) -> dict[str, Tensor | None]:
    """A, B and their gradients of all layers, each as one tensor if adjacent."""
    names = ("a", "b", "grad_a", "grad_b")
    return {n: one_below_the_other([getattr(lora, n) for lora in loras]) for n in names}


def _joined(loras: Sequence[Lora | None]) -> Lora | None:
    """Adjacent adapters as one: A has the ranks, and B the rows, of all."""
    present = [lora for lora in loras if lora is not None]
    if not present:
        return None
    parts: Any = _stacks(present)
    return replace(present[0], r=sum(lora.r for lora in present), **parts)
