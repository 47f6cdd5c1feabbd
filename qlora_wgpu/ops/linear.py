"""Frozen linear layers with LoRA adapters: y = x·Wᵀ + bias + s·(drop(x)·Aᵀ)·Bᵀ (+ residual).

The mathematics is that of ``ops/linear.py`` without a backward and without dropout.

With u = s·drop(x)·Aᵀ and du = s·dy·B the gradients are dB = dyᵀ·u, dA = duᵀ·drop(x) and
dx = dy·W + mask·(du·A): the adapter costs two skinny products and an epilogue of the base's.

Their matrices are dequantized one below the other, so that y = x·Wᵀ and dx = Σ dy·W are one product
each, and so are the thin products of adapters whose A and B follow each other in the flat vector.
The layers keep what is theirs: results, adapters, gradients. The mathematics is that of
``ops/linear.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from qlora_wgpu.gpu.limits import MOST_STORAGE_BUFFERS
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import ExpertTiles
from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm
from qlora_wgpu.kernels.lora import (
    BOTH_GRADS,
    DOWN,
    UP_GRAD,
    BothGrads,
    Down,
    FactorGrad,
    Lora,
    UpGrad,
)
from qlora_wgpu.kernels.matvec import FEW_ROWS, FewRows, QuantizedRows, Strips
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import DenseMatrix, Linear, Matrix
from qlora_wgpu.ops.pointwise import dropout_parts
from qlora_wgpu.ops.quantized import (
    QuantizedMatrix,
    StripStore,
    dequantize_together,
    kept_together,
    rows_of,
)
from qlora_wgpu.ops.tensor import as_operand, fill_zero, summed


def readable(g: Graph, weights: Sequence[Matrix]) -> QuantizedRows | None:
    """Quantized matrices of one input as these products read them, if they can be one product."""
    quantized = [w for w in weights if isinstance(w, QuantizedMatrix) and w.experts == 1]
    return rows_of(g, quantized) if len(quantized) == len(weights) else None


def pieces(
    g: Graph, weight: Matrix, strips: StripStore | None
) -> Iterator[tuple[int, Tensor | QuantizedRows | Strips]]:
    """Yields ``(first row, some rows)`` of a matrix as these products read it."""
    if isinstance(weight, QuantizedMatrix):
        whole = copied(g, [weight], strips) or readable(g, [weight])
        if whole is not None:
            yield 0, whole
            return
    still = isinstance(weight, DenseMatrix) and weight.trained is None and weight.whole is None
    for row0, w in weight.shards(g):
        made = strips.of_dense(g, w) if strips is not None and still else None
        yield row0, made or w


def copied(g: Graph, weights: Sequence[Matrix], strips: StripStore | None) -> Strips | None:
    """Quantized matrices of one input in strips, if there are such."""
    quantized = [w for w in weights if isinstance(w, QuantizedMatrix) and w.experts == 1]
    if strips is None or len(quantized) < len(weights):
        return None
    return strips.of_quantized(g, quantized)


def lora_term(g: Graph, x: Tensor, lora: Lora | None) -> LoraTerm | None:
    """u = scaling · x·Aᵀ and B, of a layer or of several whose adapters lie together.

    The RMSNorm that made x is a part of its launch, if it was the last one.
    """
    if lora is None:
        return None
    u = g.float32("lora u", x.rows, lora.r)
    FEW_ROWS.launch(g, FewRows(x, lora.a, (u,), scale=lora.scaling, label="lora/down"))
    return lora.forward_term(u)


def product(
    g: Graph,
    x: Tensor,
    weight: Matrix,
    y: Tensor,
    *,
    scale: float = 1.0,
    term: LoraTerm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    strips: StripStore | None = None,
    label: str = "few_rows/forward",
) -> None:
    """y = scale · x·wᵀ + term + bias + residual; all of y is overwritten.

    Args:
        g: The graph.
        x: (rows, in_features) of any type.
        weight: The matrix.
        y: (rows, out_features).
        scale: The factor of the product alone.
        term: LoRA's.
        bias: float32 (out_features).
        residual: (rows, out_features).
        strips: Where there are copies of the weights for it.
        label: For timing tables.
    """
    for row0, w in pieces(g, weight, strips):
        problem = FewRows(
            x, w, (y,), row0=row0, scale=scale, lora=term, bias=bias, residual=residual,
            label=label,
        )  # fmt: skip
        FEW_ROWS.launch(g, problem)


def down(
    g: Graph, x: Tensor, lora: Lora, batch: BatchBuffers, experts: ExpertTiles | None = None
) -> Tensor:
    """u = scaling · dropout(x)·Aᵀ, (rows, r) float32.

    Raises:
        GraphError: If the shapes do not fit.
    """
    u = g.float32("lora u", x.rows, lora.r)
    DOWN.launch(g, Down(x, lora, u, batch.info, experts))
    return u


def backward(
    g: Graph,
    x: Tensor,
    u: Tensor,
    dy: Tensor,
    lora: Lora,
    batch: BatchBuffers,
    experts: ExpertTiles | None = None,
) -> Tensor:
    """Adds to the gradients of A and B, and returns du = scaling · dy·B.

    Args:
        g: The graph.
        x: (rows, in_features), what the layer was given.
        u: (rows, r) float32, of the forward.
        dy: (rows, out_features).
        lora: The adapter.
        batch: The micro-batch, for dropout.
        experts: If given, each tile of rows belongs to an expert with factors of its own.

    Raises:
        GraphError: If the shapes do not fit.
    """
    x = g.again(x)
    du = g.float32("d lora u", x.rows, lora.r)
    UP_GRAD.launch(g, UpGrad(dy, lora, du, experts))
    rows = experts.rows if experts is not None else None
    with summed(g, lora.grad_a) as grad_a, summed(g, lora.grad_b) as grad_b:
        of_b = FactorGrad(dy, u, grad_b, expert_rows=rows, expert_stride=lora.b_stride)
        of_a = FactorGrad(x, du, grad_a, True, lora.mask, batch.info, rows, lora.a_stride)
        BOTH_GRADS.launch(g, BothGrads(of_b, of_a))
    return du


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
    """Applies a layer.

    Args:
        g: The graph.
        x: (rows, in_features) operand.
        layer: The layer to apply.
        batch: The micro-batch, for dropout.
        residual: (rows, out_features) float32 to add.
        multiplier: Factor of all but the residual; a layer with a bias takes 1 alone.
        float32: Whether the result is float32 without a residual, too.

    Returns:
        (rows, out_features): float32 with a residual, else an operand.

    Raises:
        GraphError: If the shapes do not fit, or the layer has a bias and the multiplier is not 1.
    """
    _check(x, layer, residual, multiplier)
    lora = layer.lora
    if lora is not None:
        lora = replace(lora, scaling=multiplier * lora.scaling)
    if lora is None or lora.magnitude is None:
        parts = _Sum(layer, lora, batch, multiplier, layer.bias, residual)
        return _product(g, x, parts, float32=float32 or residual is not None)
    # DoRA scales what the layer makes before bias and residual are added.
    float32 = float32 or residual is not None
    inverse = _inverse(g, layer, batch)
    scaled = _Sum(layer, lora, batch, multiplier, None, None, inverse)
    if lora.mask is not None and batch.drops:
        # As in PEFT it scales what dropout keeps of the input; the rest passes the base alone.
        kept, rest = dropout_parts(g, x, lora.mask, batch)
        beside = _Sum(layer, None, batch, multiplier, None, residual)
        residual = _product(g, rest, beside, float32=True)
        x, scaled = kept, replace(scaled, lora=replace(lora, dropout=0.0))
    z = _product(g, x, scaled, float32=False)
    return dora.apply(g, z, lora, inverse, layer.bias, residual, float32=float32)


def _inverse(g: Graph, layer: Linear, batch: BatchBuffers) -> Tensor:
    """Room for DoRA's 1 / ‖W + s·B·A‖: new tokens find there what their text's prompt put there."""
    name, rows = f"{layer.name}.norm", layer.weight.rows
    return g.float_vector(name, rows) if batch.cache is None else batch.cache.norm(name, rows)


def _check(x: Tensor, layer: Linear, residual: Tensor | None, multiplier: float) -> None:
    if multiplier != 1.0 and layer.bias is not None:
        raise GraphError(f"linear: {layer.name} has a bias, which would miss the multiplier")
    shape = (x.rows, layer.weight.rows)
    if residual is not None and residual.shape != shape:
        raise GraphError(
            f"linear: {residual} cannot be added to {layer.name}'s {shape[0]}x{shape[1]}"
        )


@dataclass(frozen=True)
class _Sum:
    """What one product makes: multiplier · x·Wᵀ + u·Bᵀ + bias + residual.

    Attributes:
        layer: The layer.
        lora: Its adapter, the multiplier in its scaling.
        batch: The micro-batch, for dropout.
        multiplier: The factor of x·Wᵀ.
        bias: The bias to add.
        residual: The residual to add.
        inverse: Where DoRA's 1 / ‖W + s·B·A‖ go, which want each shard of W, too.
    """

    layer: Linear
    lora: Lora | None
    batch: BatchBuffers
    multiplier: float
    bias: Tensor | None
    residual: Tensor | None
    inverse: Tensor | None = None


def _product(g: Graph, x: Tensor, parts: _Sum, *, float32: bool) -> Tensor:
    layer, lora = parts.layer, parts.lora
    y = (g.float32 if float32 else g.operand)(layer.name, x.rows, layer.weight.rows)
    if parts.batch.decodes:
        _product_of_few(g, x, y, parts)
        return y
    u = None if lora is None else down(g, x, lora, parts.batch)
    term = lora.forward_term(u) if lora is not None and u is not None else None
    for row0, w in layer.weight.shards(g):
        product = Gemm(
            x, w, y, True, row0=row0, scale=parts.multiplier, lora=term, bias=parts.bias,
            residual=parts.residual, label="gemm/forward",
        )  # fmt: skip
        GEMM.launch(g, product)
        if parts.inverse is not None and layer.lora is not None:
            dora.norm(g, w, layer.lora, parts.inverse, row0, layer.lora.scaling)
    inputs = [x] if parts.residual is None else [x, parts.residual]
    wanted = g.dtype if parts.residual is None else None
    g.record(
        y, inputs, lambda dy: _backward(g, x, u, dy, parts), trains=lora is not None, wanted=wanted
    )
    return y


def _product_of_few(g: Graph, x: Tensor, y: Tensor, parts: _Sum) -> None:
    """The same for new tokens."""
    layer = parts.layer
    product(
        g, x, layer.weight, y, scale=parts.multiplier, bias=parts.bias, residual=parts.residual,
        term=lora_term(g, x, parts.lora), strips=parts.batch.strips,
    )  # fmt: skip


def _backward(g: Graph, x: Tensor, u: Tensor | None, dy: Tensor, parts: _Sum) -> None:
    operand, lora, term = as_operand(g, dy), parts.lora, None
    if lora is not None and u is not None:
        term = lora.backward_term(backward(g, x, u, operand, lora, parts.batch))
    if x.requires_grad:
        dx = g.gradient_for(x)
        for row0, w in parts.layer.weight.shards(g):
            if w.rows < parts.layer.weight.rows:  # shards' products add up
                dx = replace(dx, dtype="float32") if row0 == 0 else dx
            product = Gemm(
                operand, w, dx, False, row0=row0, accumulate=row0 > 0, scale=parts.multiplier,
                lora=term if row0 == 0 else None,  # it joins the first shard's product
                batch_info=parts.batch.info, label="gemm/backward",
            )  # fmt: skip
            GEMM.launch(g, product)
        g.add_gradient(x, dx)
    if parts.residual is not None:
        g.add_gradient(parts.residual, dy)


_MOST = 3  # layers of a product
_RANKS = 8  # of which the kernels take so many at once


def is_group(g: Graph, layers: Sequence[Linear], batch: BatchBuffers) -> bool:
    """Whether layers may be one product here; those that may not are applied one by one.

    They may where the profile says that it pays, or for new tokens, the weights are quantized and
    of one input, the biases, if any, lie in one storage, and the adapters, if any, are alike and
    lie together, without DoRA, and for all but new tokens without dropout.
    """
    weights = [layer.weight for layer in layers]
    if batch.decodes:
        layers = _without_dropout(layers)
    return (
        (g.profile.fused_linears or (batch.decodes and readable(g, weights) is not None))
        and 2 <= len(layers) <= _MOST
        and all(isinstance(weight, QuantizedMatrix) and weight.experts == 1 for weight in weights)
        and len({weight.columns for weight in weights}) == 1
        and all(weight.rows % 8 == 0 for weight in weights)
        and _biases_fit([layer.bias for layer in layers])
        and len(layers) <= _most_like(g, layers[0])
        and _fits_a_binding(g, layers)
        and _adapters_fit([layer.lora for layer in layers])
    )


def _without_dropout(layers: Sequence[Linear]) -> list[Linear]:
    return [
        layer if layer.lora is None else replace(layer, lora=replace(layer.lora, dropout=0.0))
        for layer in layers
    ]


def largest_group(g: Graph, layers: Sequence[Linear], batch: BatchBuffers) -> list[Linear]:
    """As many of some layers of one input as may be one product, the last first; or none."""
    for count in range(min(len(layers), _MOST), 1, -1):
        for some in reversed(list(combinations(layers, count))):
            if is_group(g, some, batch):
                return list(some)
    return []


def linear_group(
    g: Graph,
    x: Tensor,
    layers: Sequence[Linear],
    batch: BatchBuffers,
    float32: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Applies layers that are a group.

    Args:
        g: The graph.
        x: (rows, in_features) operand.
        layers: What is applied.
        batch: The micro-batch.
        float32: Which results are float32.

    Returns:
        (rows, out_features) of each layer: operands, or float32.

    Raises:
        GraphError: If the layers are no group, or x does not fit them.
    """
    if not is_group(g, layers, batch) or x.columns != layers[0].weight.columns:
        raise GraphError(f"linear_group: {[layer.name for layer in layers]} of {x} are no group")
    if batch.decodes:
        layers = _without_dropout(layers)
    group = _Group(tuple(layers), _joined([layer.lora for layer in layers]), batch)
    flags = float32 or [False] * len(layers)
    ys = [
        (g.float32 if flag else g.operand)(layer.name, x.rows, layer.weight.rows)
        for layer, flag in zip(layers, flags, strict=True)
    ]
    if batch.decodes:
        _product_of_few_jointly(g, x, ys, group)
        return ys
    lora = group.lora
    u = None if lora is None else down(g, x, lora, batch)
    term = lora.forward_term(u) if lora is not None and u is not None else None
    bias, begins = group.bias
    product = Gemm(
        x, group.weights(g), ys[0], True, lora=term, bias=bias, bias_begins=begins,
        others=tuple(ys[1:]), label="gemm/forward",
    )  # fmt: skip
    GEMM.launch(g, product)
    _record(g, x, u, ys, group)
    return ys


def _product_of_few_jointly(g: Graph, x: Tensor, ys: list[Tensor], group: _Group) -> None:
    """The same for new tokens, decoded on the way where the matrices lie together."""
    bias, begins = group.bias
    weights = [layer.weight for layer in group.layers]
    w = copied(g, weights, group.batch.strips) or readable(g, weights) or group.weights(g)
    term = lora_term(g, x, group.lora)
    FEW_ROWS.launch(g, FewRows(x, w, tuple(ys), lora=term, bias=bias, bias_begins=begins))


@dataclass(frozen=True)
class _Group:
    """Layers of one input; ``lora`` has the ranks of all their adapters."""

    layers: tuple[Linear, ...]
    lora: Lora | None
    batch: BatchBuffers

    def weights(self, g: Graph) -> Tensor:
        """All matrices, one below the other: kept so, or free after the next product."""
        weights = [layer.weight for layer in self.layers]
        matrices = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
        if (kept := kept_together(matrices)) is not None:
            return kept
        rows = sum(layer.weight.rows for layer in self.layers)
        w = g.weight("·".join(layer.name for layer in self.layers), rows, self._columns)
        dequantize_together(g, w, matrices)
        return w

    @property
    def bias(self) -> tuple[Tensor | None, tuple[int, ...]]:
        """All biases as one tensor, and where those of the further layers begin in it."""
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        if not biases:
            return None, ()
        first, last = biases[0], biases[-1]
        length = (last.offset - first.offset) // 4 + last.stride
        begins = tuple((bias.offset - first.offset) // 4 for bias in biases[1:])
        return replace(first, columns=length, stride=length), begins

    @property
    def _columns(self) -> int:
        return self.layers[0].weight.columns


def _record(g: Graph, x: Tensor, u: Tensor | None, ys: list[Tensor], group: _Group) -> None:
    """Notes a backward that runs once all layers' gradients are there."""

    def vjp(gradients: list[Tensor | None]) -> None:
        dys = [
            _zeros(g, y) if dy is None else as_operand(g, dy)
            for y, dy in zip(ys, gradients, strict=True)
        ]
        _backward_jointly(g, x, u, dys, group)

    g.record_jointly(ys, [x], vjp, trains=group.lora is not None, wanted=g.dtype)


def _backward_jointly(
    g: Graph, x: Tensor, u: Tensor | None, dys: list[Tensor], group: _Group
) -> None:
    term, lora = None, group.lora
    if lora is not None and u is not None:
        term = lora.backward_term(_adapter_gradients(g, x, u, dys, lora))
    if x.requires_grad:
        dx = g.gradient_for(x)
        product = Gemm(
            dys[0], group.weights(g), dx, False, lora=term, others=tuple(dys[1:]),
            label="gemm/backward",
        )  # fmt: skip
        GEMM.launch(g, product)
        g.add_gradient(x, dx)


def _adapter_gradients(g: Graph, x: Tensor, u: Tensor, dys: list[Tensor], lora: Lora) -> Tensor:
    """Adds to the gradients of all A and B, and returns all du side by side."""
    x = g.again(x)
    du = g.float32("d lora u", x.rows, lora.r)
    first, others = dys[0], tuple(dys[1:])
    UP_GRAD.launch(g, UpGrad(first, lora, du, others=others))
    with summed(g, lora.grad_a) as grad_a, summed(g, lora.grad_b) as grad_b:
        of_b = FactorGrad(first, u, grad_b, others=others)
        BOTH_GRADS.launch(g, BothGrads(of_b, FactorGrad(x, du, grad_a, True)))
    return du


def _zeros(g: Graph, like: Tensor) -> Tensor:
    """The gradient of a result that leads to nothing."""
    zeros = g.operand(f"d {like.name}", like.rows, like.columns)
    fill_zero(g, zeros)
    return zeros


def _fits_a_binding(g: Graph, layers: Sequence[Linear]) -> bool:
    rows = sum(layer.weight.rows for layer in layers)
    return g.weight("", rows, layers[0].weight.columns).nbytes <= g.max_binding


def _biases_fit(biases: Sequence[Tensor | None]) -> bool:
    """Whether there are none, or one for each, one after the other in one storage."""
    there = [bias for bias in biases if bias is not None]
    if not there:
        return True
    offsets = [bias.offset for bias in there]
    storage = there[0].storage
    together = storage is not None and all(bias.storage is storage for bias in there)
    return len(there) == len(biases) and together and offsets == sorted(offsets)


def _most_like(g: Graph, layer: Linear) -> int:
    with_bias, with_lora = layer.bias is not None, layer.lora is not None
    return most_layers(g, with_bias=with_bias, with_lora=with_lora)


def most_layers(g: Graph, *, with_bias: bool, with_lora: bool) -> int:
    """How many layers a product has at most, by the storage buffers that its forward binds.

    It has the most: x, w and the results, u and B, biases, and where it counts saturated values.
    """
    counted = g.profile.saturates and g.saturated is not None
    return min(_MOST, MOST_STORAGE_BUFFERS - 2 - 2 * with_lora - with_bias - counted)


def _adapters_fit(loras: Sequence[Lora | None]) -> bool:
    there = [lora for lora in loras if lora is not None]
    if not there:
        return True
    first = there[0]
    return (
        len(there) == len(loras)
        and all((lora.r, lora.scaling) == (first.r, first.scaling) for lora in there)
        and all(lora.mask is None and lora.magnitude is None for lora in there)
        and first.r % _RANKS == 0
        and all(_lie_together(tensors) for tensors in _stacks(there))
    )


def _stacks(loras: Sequence[Lora]) -> list[list[Tensor]]:
    return [[getattr(lora, name) for lora in loras] for name in ("a", "b", "grad_a", "grad_b")]


def _lie_together(tensors: list[Tensor]) -> bool:
    """Whether each begins where the one before ends."""
    end = tensors[0].offset
    for tensor in tensors:
        if tensor.storage is None or tensor.storage is not tensors[0].storage:
            return False
        if tensor.offset != end:
            return False
        end += tensor.nbytes
    return True


def _joined(loras: Sequence[Lora | None]) -> Lora | None:
    """Adapters that lie together as one: A has the ranks, and B the rows, of all."""
    there = [lora for lora in loras if lora is not None]
    if not there:
        return None
    a, b, grad_a, grad_b = (
        replace(tensors[0], rows=sum(tensor.rows for tensor in tensors))
        for tensors in _stacks(there)
    )
    ranks = sum(lora.r for lora in there)
    return replace(there[0], r=ranks, a=a, b=b, grad_a=grad_a, grad_b=grad_b)
