"""Frozen linear layers of one input as one product: q, k and v, or gate and up.

Their matrices are dequantized one below the other, so that y = x·Wᵀ and dx = Σ dy·W are one product
each, and so are the thin products of adapters whose A and B follow each other in the flat vector.
The layers keep what is theirs: results, adapters, gradients. The mathematics is that of
``ops/linear.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from qlora_wgpu.gpu.sizes import MOST_STORAGE_BUFFERS
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.few_rows import FEW_ROWS, FewRows
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import UP_GRAD, Lora, UpGrad
from qlora_wgpu.kernels.lora_grad import BOTH_GRADS, BothGrads, FactorGrad
from qlora_wgpu.ops import lora as lora_ops
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.few_rows import copied, lora_term, readable
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.quantized import QuantizedMatrix, dequantize_together, kept_together
from qlora_wgpu.ops.tensor import as_operand, fill_zero, summed

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
        _product_of_few(g, x, ys, group)
        return ys
    lora = group.lora
    u = None if lora is None else lora_ops.down(g, x, lora, batch)
    term = lora.forward_term(u) if lora is not None and u is not None else None
    bias, begins = group.bias
    product = Gemm(
        x, group.weights(g), ys[0], True, lora=term, bias=bias, bias_begins=begins,
        others=tuple(ys[1:]), label="gemm/forward",
    )  # fmt: skip
    GEMM.launch(g, product)
    _record(g, x, u, ys, group)
    return ys


def _product_of_few(g: Graph, x: Tensor, ys: list[Tensor], group: _Group) -> None:
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
        _backward(g, x, u, dys, group)

    g.record_jointly(ys, [x], vjp, trains=group.lora is not None, wanted=g.dtype)


def _backward(g: Graph, x: Tensor, u: Tensor | None, dys: list[Tensor], group: _Group) -> None:
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
