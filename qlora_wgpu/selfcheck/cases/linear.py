"""Products and layers: single, grouped, with LoRA, DoRA and dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import (
    LARGEST_FLOAT16,
    Storage,
    Tensor,
    padded,
    round_up,
    row_blocks,
    vector,
)
from qlora_wgpu.kernels.common import DropoutMask
from qlora_wgpu.kernels.gemm import Gemm, factors_of
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.model.quantized_weights import quantized_matrix
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.linear import linear, linear_group, most_layers
from qlora_wgpu.ops.modules import DenseMatrix, Linear, Matrix
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.pointwise import dropout_parts
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference.tape import constant, grad, through
from qlora_wgpu.selfcheck.cases.common import (
    KEY,
    ONES,
    ROWS,
    Adapter,
    Exact,
    compare_op,
    each,
    filled_adapter,
    normal,
    of_names,
)
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_NAMES = ("q_proj", "up_proj")


@each(*((shape, double) for shape in ((37, 20), (90, 96), (5, 7)) for double in (True, False)))
def check_dequantization(run: Runner, shape: tuple[int, int], double: bool) -> None:
    """NF4 codes with and without double quantization, whole words and not, in several shards."""
    weights = normal("w", *shape) * np.geomspace(0.1, 10, shape[0])[:, None]
    quantized = quantize_nf4(weights.astype(np.float32), 64, double)
    weight = quantized_matrix("w", quantized, textures=run.graph.profile.textures)
    run.graph.max_binding = 32 * run.weight(np.zeros((1, shape[1]))).nbytes
    shards = [shard for _, shard in weight.shards(run.graph)]
    exact = run.rounded_weight(quantized.dequantize().astype(np.float64))
    run.compare(np.concatenate(run.run(*shards)), exact, shards[0].dtype, by_row=True)


@each(
    ((ROWS - 5, 5), 0, 0, None), ((20, 2100), 0, 0, (8, 17)), ((20, 44), 0, 0, (8, 1)),
    ((17, 150), 64, 0, None), ((32, 150), 64, 0, None), ((37, 16, 8, 24), 0, 0, None),
    ((20, 44), 0, 16, None),
)  # fmt: skip
def check_factors_of_gradients(
    run: Runner, shape: tuple[int, ...], part: int, row0: int, counted: tuple[int, int] | None
) -> None:
    """Gradients as f16, scaled by a power of two per tile of rows and part of columns.

    NaN and infinity are ignored and unchanged. ``counted`` is the first label row and their number
    from there on.
    """
    tile, (rows, *widths) = 16, shape
    depth = sum(widths)
    # The first rows are larger than the last tile's, later columns than earlier ones, and a value
    # that a workgroup reads last is the largest.
    x = normal("x", rows, row0 + depth) * 10.0 ** ((7 * np.arange(rows) + 1) % 20 - 9)[:, None]
    x[:, row0:] *= 10.0 ** (np.arange(depth) // 64 % 3)
    x[:, row0 + 2047 : row0 + 2048] = 1e3 * np.abs(x).max(axis=1, keepdims=True)
    x[3, row0], x[9, row0 + 1], x[10, row0] = np.nan, np.inf, -np.inf
    first, *others = (
        run.operand(each) for each in np.split(x, row0 + np.cumsum(widths)[:-1], axis=1)
    )
    first_row, labels = counted or (None, rows)
    targets = np.where(np.arange(rows + 8) < (first_row or 0) + labels, 1, -100)[None]
    batch = run.batch(np.ones(targets.shape, np.int64), targets=targets)
    gemm = Gemm(
        first, run.weight(np.zeros((depth, 8))), run.graph.float32("y", rows, 8), False, row0=row0,
        batch_info=batch.info, first_row=first_row, others=tuple(others), part=part,
    )  # fmt: skip
    factors = factors_of(run.graph, gemm, tile)
    assert factors.exponents is not None
    got, exponents = run.run(factors.x, factors.exponents)
    x = run.rounded(x)[:labels, row0:]
    expected = []
    for begin in range(0, depth, part or depth):
        own = np.s_[begin : begin + (part or depth)]
        for end in range(tile, labels + tile, tile):
            tiled = x[end - tile : end, own]
            largest = np.abs(tiled[np.isfinite(tiled)]).max()
            expected.append(127 + 14 - np.floor(np.log2(largest)))
            tiled *= 2.0 ** (expected[-1] - 127)
    tiles = -(-rows // tile)
    found = exponents.reshape(-1, tiles)[:, : -(-labels // tile)]
    run.compare_exactly(found.ravel(), np.array(expected))
    finite = np.isfinite(x)
    run.compare_exactly(got[:labels][~finite], x[~finite])
    run.compare(np.where(finite, got[:labels], 0), np.where(finite, x, 0), "float16")


def check_values_beyond_float16(run: Runner) -> None:
    """Inputs and 4-bit weights beyond 65,504: exact, or clamped and counted once each."""
    rows, inner, outer = 150, 72, 200
    x = np.ones((rows, inner))
    x[3, 5], x[140, 71] = 1e5, -3e6
    stored = np.ones((outer, inner), np.float32)
    stored[7, 9], stored[199, 71] = 2e5, -1e6
    quantized = quantize_nf4(stored, 64, False)
    weight = quantized_matrix("w", quantized, textures=run.graph.profile.textures)
    batch, tx = run.batch(np.ones((1, rows), np.int64)), run.operand(x)
    y = linear(run.graph, tx, Linear("x", weight, None, None), batch, float32=True)
    counts = run.graph.saturated
    got, *counted = run.run(y, *([counts] if counts is not None else []))
    w, x = quantized.dequantize().astype(np.float64), run.rounded(x)
    beyond = [int((np.abs(values) > LARGEST_FLOAT16).sum()) for values in (x, w)]
    if run.graph.weight_dtype == "float16":
        x, w = (np.clip(values, -LARGEST_FLOAT16, LARGEST_FLOAT16) for values in (x, w))
    run.compare(got, x @ run.rounded_weight(w).T, by_row=True)
    for value in counted:
        held = sum(beyond) if run.graph.weight_dtype == "float16" else 0
        run.compare_exactly(value[0], np.array(float(held)))


Weight = tuple[Matrix, Array]
"""A matrix, and its numbers as used in products."""


@dataclass(frozen=True)
class Layers:
    """Linear layers of one input, with the inputs of their formula."""

    linears: list[Linear]
    weights: list[Array]
    biases: list[Array]
    adapter: Adapter | None

    @classmethod
    def of(
        cls,
        run: Runner,
        weights: Mapping[str, Weight],
        r: int,
        *,
        has_bias: bool = False,
        together: bool = False,
        scaling: int = 2,
        **config: Any,
    ) -> Layers:
        """Layers by module name; without adapters if r is 0.

        With ``together``, biases are in one storage; ``config`` is the adapters'.
        """
        specs = [
            LinearSpec(f"model.layers.0.{n}", w.rows, w.columns) for n, (w, _) in weights.items()
        ]
        lora = LoraConfig(r=max(r, 1), lora_alpha=scaling * max(r, 1), **config)
        adapter = filled_adapter(lora, specs) if r else None
        biases = [normal(f"bias of {s.name}", s.out_features) * has_bias for s in specs]
        given: Sequence[Tensor | None] = [None] * len(specs)
        if has_bias:
            given = in_one_storage(biases) if together else [run.float32(bias) for bias in biases]
        linears = [
            Linear(spec.name, w, bias, adapter[0].loras[spec.name] if adapter else None)
            for spec, (w, _), bias in zip(specs, weights.values(), given, strict=True)
        ]
        return cls(linears, [w for _, w in weights.values()], biases, adapter)

    def formula(
        self, x: Array, parts: Mapping[str, Array] | None = None, masks: Sequence[Array] = ()
    ) -> tuple[Array, ...]:
        """Their outputs for x, given the parts of their adapter, and dropout masks if any."""
        ys = []
        masks = masks or [np.ones(x.shape)] * len(self.linears)
        for layer, w, bias, mask in zip(
            self.linears, self.weights, self.biases, masks, strict=True
        ):
            if parts is not None and layer.lora is not None:
                a, b = of_names(parts, layer.name)
                ys.append(linear_reference.linear(x, w, a, b, layer.lora.scaling, mask, bias))
            else:
                ys.append(x @ w.T + bias)
        return tuple(ys)

    def dora(
        self, run: Runner, x: Array, parts: Mapping[str, Array], masks: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The same with DoRA, and each result before scaling, which is an operand."""
        ys, scaled = [], []
        for layer, w, bias, mask in zip(
            self.linears, self.weights, self.biases, masks, strict=True
        ):
            a, b, m = of_names(parts, layer.name)
            both = linear_reference.dropout_parts(x, mask)
            kept, rest = (through(part, run.rounded) for part in both)
            z = linear_reference.linear(kept, w, a, b, 2.0, np.ones(x.shape))
            norms = linear_reference.dora_norm(w, constant(a), constant(b), 2.0)
            scaled.append(linear_reference.dora(through(z, gradient=run.rounded), m, norms))
            ys.append(scaled[-1] + through(rest @ w.T, gradient=run.rounded) + bias)
        return ys, scaled


def dense(run: Runner, w: Array, rows: int | None = None) -> tuple[DenseMatrix, Array]:
    shards = (
        (i, run.weight(w[i : i + (rows or len(w))])) for i in range(0, len(w), rows or len(w))
    )
    return DenseMatrix(len(w), w.shape[1], tuple(shards)), run.rounded_weight(w)


def in_one_storage(arrays: Sequence[Array]) -> list[Tensor]:
    """Vectors in one storage, aligned for bindings."""
    begins = np.cumsum([0, *(round_up(len(array), ALIGNMENT // 4) for array in arrays)])
    data = np.zeros(begins[-1], np.float32)
    storage = Storage("biases", "check", data.nbytes, data)
    tensors = []
    for array, begin in zip(arrays, begins.tolist(), strict=False):
        data[begin : begin + len(array)] = array
        tensors.append(vector("bias", len(array), "float32", storage, 4 * begin))
    return tensors


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, its adapter and its shards."""

    rows: int
    inner: int
    outer: int
    r: int
    shard: int = 72


_ODD = Sizes(ROWS, 72, 130, 5)
_NARROW = Sizes(ROWS, 44, 130, 5)  # the input's gradient is a skinny product
_LARGE = Sizes(150, 530, 530, 37)  # more than one workgroup computes, or sums at once
_WHOLE = Sizes(150, 200, 264, 8, 264)  # so that workgroups of all kinds have whole tiles
# So deep that GPUs split the reduction, of the forward or of the backward.
_DEEP, _WIDE = Sizes(3, 1100, 100, 5, 72), Sizes(3, 100, 1100, 5, 1088)
# So many rows that GPUs' workgroups compute more of them in an adapter's thin products.
_LONG, _LONGER = Sizes(1030, 20, 28, 8), Sizes(2060, 20, 28, 12)
# Enough rows and columns to show errors of large sizes; shallow, so that it is fast.
_VAST = Sizes(1030, 24, 2100, 0, 2100)
_FULL = Sizes(1030, 2056, 2100, 8, 2100)  # as deep, too: on Apple's M5 nothing smaller was wrong


def mask_of(lora: Lora | None, batch: BatchBuffers, columns: int) -> Any:
    """The dropout mask of a layer's input for a batch with ``KEY``, including its factor."""
    mask = lora.mask if lora and batch.drops else None
    if mask is None:
        return np.ones((batch.rows, columns))
    drawn = batch.rows, padded(columns), columns, mask.probability, KEY, mask.key
    return linear_reference.dropout_mask(*drawn)


def adapted(
    run: Runner, s: Sizes, *names: str, has_bias: bool = False, dropout: float = 0.0, **config: Any
) -> Layers:
    weights = {n: dense(run, normal(f"w of {n}", s.outer, s.inner), s.shard) for n in names}
    return Layers.of(run, weights, s.r, has_bias=has_bias, lora_dropout=dropout, **config)


@each(
    (True, "residual", 0.3),
    (False, "residual", 0.0, _LARGE),
    (False, "residual", 0.0, _WHOLE),
    (False, "operand", 0.3, _LARGE),
    (True, "operand", 0.0),
    (True, "float32", 0.3),
    (False, "float32", 0.0),
    (False, "float32", 0.0, replace(_ODD, r=0)),
    (False, "operand", 0.0, replace(_ODD, r=0)),
    (True, "residual", 0.0, replace(_ODD, r=0)),
    (True, "residual", 0.3, _DEEP),
    (True, "operand", 0.0, _DEEP),
    (False, "operand", 0.3, _WIDE),
    (False, "float32", 0.0, _WIDE),
    (False, "operand", 0.0, _VAST),
)
def check_linear(run: Runner, has_bias: bool, output: str, dropout: float, s: Sizes = _ODD) -> None:
    """Two layers of one input, in two shards: y, the sum of dx, and the adapter's gradient.

    Dropout is on only for the first one; the second is as in evaluation.
    """
    layers = adapted(run, s, *_NAMES, has_bias=has_bias, dropout=dropout)
    ones = np.ones((1, s.rows), np.int64)
    batches = run.batch(ones, dropout_key=KEY), run.batch(ones)
    compare_layers(run, layers, batches, output, exact=(True, False))


def compare_layers(
    run: Runner,
    layers: Layers,
    batches: Sequence[BatchBuffers],
    output: str = "operand",
    *,
    exact: bool | Sequence[bool] | None = True,
    group: Sequence[bool] | None = None,
    multiplier: float = 1.0,
    size: float = 1.0,
) -> None:
    """Compares layers of one input, scaled by ``size``, each applied with its batch.

    The output is an operand, float32, or float32 with a residual; a ``group`` lists which results
    are float32.
    """
    rows, first = batches[0].rows, layers.linears[0]
    skip = [Exact(normal("skip", rows, first.weight.rows))] * (output == "residual")
    masks = [
        mask_of(layer.lora, batch, layer.weight.columns)
        for layer, batch in zip(layers.linears, batches, strict=True)
    ]
    has_dora = first.lora is not None and first.lora.magnitude is not None
    scaled = list[Array]()

    def op(g: Graph, x: Tensor, *residual: Tensor) -> list[Tensor]:
        if group is not None:
            return linear_group(g, x, layers.linears, batches[0], group)
        options: Any = {"multiplier": multiplier, "float32": output == "float32"}
        pairs = zip(layers.linears, batches, strict=True)
        return [linear(g, x, each, batch, *residual, **options) for each, batch in pairs]

    def formula(x: Array, *residual: Array, parts: dict[str, Array] | None = None) -> Any:
        if has_dora and parts is not None:
            made, products = layers.dora(run, x, parts, masks)
            scaled.extend(ROUNDING[run.dtype] * np.abs(constant(y)) for y in products)
            return tuple(y + sum(residual) for y in made)
        ys = (multiplier * y for y in layers.formula(x, parts, masks))
        return tuple(through(y, gradient=run.rounded) + sum(residual) for y in ys)

    inputs: list[Array | Exact] = [size * normal("x", rows, first.weight.columns), *skip]
    compare_op(
        run, op, formula, inputs, exact=exact, adapter=layers.adapter,
        inner=ROUNDING[run.dtype] / 2 * has_dora, inner_ys=scaled,
    )  # fmt: skip


@each(
    (_ODD, 0.3),
    (_NARROW, 0.3),
    (_LARGE, 0.0),
    (replace(_LARGE, r=0), 0.0),
    (_WIDE, 0.0),
    (_WIDE, 0.3),
    (replace(_WIDE, r=0), 0.0),
    (_LONG, 0.3),
    (_LONGER, 0.0),
)
def check_only_use(run: Runner, s: Sizes, dropout: float) -> None:
    """A layer that is its input's only use: dx in the input's type, and the adapter's gradient."""
    layers = adapted(run, replace(s, shard=s.outer), _NAMES[0], dropout=dropout)
    batch = run.batch(np.ones((1, s.rows), np.int64), dropout_key=KEY)
    compare_layers(run, layers, [batch])


def check_product_of_a_model(run: Runner) -> None:
    """A layer as large as a model's; a smaller one on software GPUs, which it takes a minute."""
    check_only_use(run, _LARGE if run.graph.profile.is_software else _FULL, 0.0)


def check_long_product(run: Runner) -> None:
    """A reduction that GPUs split, and an input with a sum of gradients."""
    layers = adapted(run, Sizes(3, 20, 2500, 0, 2500), _NAMES[0])
    twice = replace(layers, linears=2 * layers.linears, weights=2 * layers.weights,
                    biases=2 * layers.biases)  # fmt: skip
    compare_layers(run, twice, [run.batch(np.ones((1, 3), np.int64))] * 2, exact=(True, True))


@each((True,), (False,))
def check_norm_between_long_products(run: Runner, has_residual: bool) -> None:
    """A norm of a product that GPUs split, whose gradient is also split."""
    rows, inner, width, g = 5, 1100, 100, run.graph
    x, skip = normal("x", rows, inner), normal("skip", rows, width) * has_residual
    first, second = normal("first", width, inner), normal("second", inner, width)
    weight, dz = normal("weight", width), normal("dz", rows, inner)
    layers = Layers.of(run, {"first": dense(run, first), "second": dense(run, second)}, 0).linears
    tx, batch = run.operand(x), run.batch(np.ones((1, rows), np.int64))
    residual = run.float32(skip) if has_residual else None
    h = linear(g, tx, layers[0], batch, residual, float32=True)
    h.requires_grad = True
    y = rms_norm(g, h, run.float32(weight), 1e-5)
    z = linear(g, y, layers[1], batch)
    (dh,) = run.gradients(z, run.operand(dz), h)
    got_h, got_y, got_dh = run.run(h, y, dh)
    exact = run.rounded(x) @ run.rounded_weight(first).T + skip
    run.compare(got_h, exact)
    run.compare(got_y, norms_reference.rms_norm(exact, weight, 1e-5), y.dtype, by_row=True)
    dy = run.rounded(dz) @ run.rounded_weight(second)
    dh_exact = grad(norms_reference.rms_norm, dy, exact, weight, 1e-5)
    run.compare(got_dh, dh_exact, inner=ROUNDING[run.dtype])  # of dy, if it is not split


@each(
    ((136, 24, 40), 72, 8, 0, False),
    ((144, 136), 72, 16, 1, False),
    ((144, 136), 72, 16, 2, False),
    ((8, 16), 64, 8, 2, True),
    ((8, 16, 24), 64, 8, 0, True),
    ((24, 8, 40), 136, 0, 0, False),
    ((1024, 72, 8), 128, 24, 0, False),
    ((136, 24, 40), 72, 8, 0, True),
    ((40, 8, 24), 24, 8, 0, False, 690),
    ((40, 24), 24, 16, 0, False, 150),
)
def check_linear_group(
    run: Runner,
    outer: tuple[int, ...],
    inner: int,
    r: int,
    float32: int,
    has_bias: bool,
    rows: int = ROWS,
) -> None:
    """Layers of one input: all y, the sum of dx, and the gradients of all A and B.

    With many rows, workgroups compute more of the adapters' thin products; some results are
    float32.
    """
    g = run.graph
    g.profile = replace(g.profile, fused_linears=True)
    outer = outer[: most_layers(g, with_bias=has_bias, with_lora=r > 0)]
    weights: dict[str, Weight] = {}
    for index, (letter, columns) in enumerate(zip("qkv", outer, strict=False)):
        values = normal(f"w of {letter}", columns, inner).astype(np.float32)
        stored = quantize_nf4(values, 64, index != 1)
        held = run.rounded_weight(stored.dequantize().astype(np.float64))
        textures = g.profile.textures
        weights[f"{letter}_proj"] = quantized_matrix(letter, stored, textures=textures), held
    layers = Layers.of(run, weights, r, has_bias=has_bias, together=True)
    batch = run.batch(np.ones((1, rows), np.int64))
    flags = [index < float32 for index in range(len(outer))]
    compare_layers(run, layers, [batch] * len(outer), group=flags)


@each((True, "residual"), (False, "operand"), (True, "operand"), (False, "residual"),
      (False, "float32"), (True, "float32"), (True, "residual", 0.3),
      (False, "operand", 0.3))  # fmt: skip
def check_dora(run: Runner, has_bias: bool, output: str, dropout: float = 0.0) -> None:
    """Two layers of one input: y, the sum of dx, and the gradients of A, B and the magnitudes.

    The input is small, so that rounding errors of the sums are small and hide no summand.
    """
    s, key = Sizes(ROWS, 530, 83, 3, 48), KEY if dropout else None
    layers = adapted(run, s, *_NAMES, has_bias=has_bias, dropout=dropout, use_dora=True)
    batch = run.batch(ONES, dropout_key=key)
    compare_layers(run, layers, [batch] * 2, output, exact=(True, False), size=0.05)


@each((True,), (False,))
def check_dora_norms(run: Runner, plain: bool) -> None:
    """Norms of shards of rows, or their reciprocals; for a row of zeros, zero."""
    rows, inner = 300, 530
    w = normal("w", rows, inner)
    layers = Layers.of(run, {_NAMES[0]: dense(run, w)}, 3, use_dora=True)
    out, lora = run.graph.float_vector("norms", rows), layers.linears[0].lora
    assert lora is not None and layers.adapter is not None
    for first, block in row_blocks(run.weight(w), 256):
        dora.norm(run.graph, block, lora, out, first, 2.0, plain=plain)
    a, b, _ = layers.adapter[1].values()
    (got,) = run.run(out)
    exact = linear_reference.dora_norm(run.rounded_weight(w), a, b, 2.0)
    run.compare(got[0], exact if plain else 1 / exact)


@each((True,), (False,))
def check_dropout_parts(run: Runner, in_operands: bool) -> None:
    """An input split in two, and the sum of both gradients."""
    mask = linear_reference.dropout_mask(ROWS, padded(75), 75, 0.3, KEY, 7)
    batch = run.batch(np.ones((1, ROWS), np.int64), dropout_key=KEY)

    def op(g: Graph, x: Tensor) -> tuple[Tensor, Tensor]:
        return dropout_parts(g, x, DropoutMask(0.3, 7), batch)

    def formula(x: Array) -> tuple[Array, Array]:
        return linear_reference.dropout_parts(x, mask)

    compare_op(run, op, formula, [normal("x", ROWS, 75)], exact=not in_operands)
