"""Products and layers: alone, of one input, with LoRA, DoRA and dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.gpu.limits import ALIGNMENT
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
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.quantized_weights import quantized_matrix
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.linear import linear, linear_group, most_layers
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.pointwise import dropout_parts
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    KEY,
    ROWS,
    each,
    filled_adapter,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_NAMES = ("model.layers.0.q_proj", "model.layers.0.up_proj")


@each(*((shape, double) for shape in ((37, 20), (90, 96), (5, 7)) for double in (True, False)))
def check_dequantization(run: Runner, shape: tuple[int, int], double: bool) -> None:
    """NF4 codes, singly and doubly quantized, whole words and not, in several shards."""
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
    """Gradients as f16, by a power of two of each tile's rows and of each part's columns.

    NaN and infinity have no size and stay what they are. ``counted`` says which label row is the
    first and how many there are from it on.
    """
    tile, (rows, *widths) = 16, shape
    depth = sum(widths)
    # The first rows are larger than the last tile's, later columns than earlier, and one of what a
    # workgroup looks at last is the largest.
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
    """Inputs and 4-bit weights beyond 65,504: exact, or held there and each counted once."""
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


@dataclass(frozen=True)
class _Sizes:
    rows: int
    inner: int
    outer: int
    r: int
    shard: int = 72


_ODD = _Sizes(ROWS, 72, 130, 5)
_NARROW = _Sizes(ROWS, 44, 130, 5)  # the gradient of whose input is a skinny product
_LARGE = _Sizes(150, 530, 530, 37)  # more than one workgroup makes, or adds up at once
_WHOLE = _Sizes(150, 200, 264, 8, 264)  # so that a workgroup of any kind has all that it makes
# So deep that GPUs cut the reduction, of the forward or of the backward.
_DEEP, _WIDE = _Sizes(3, 1100, 100, 5, 72), _Sizes(3, 100, 1100, 5, 1088)
# So many rows that a workgroup of GPUs makes more of them in an adapter's thin products.
_LONG, _LONGER = _Sizes(1030, 20, 28, 8), _Sizes(2060, 20, 28, 12)


# More rows and columns than a fault of large sizes may spare; shallow, so that it is quick.
_VAST = _Sizes(1030, 24, 2100, 8, 2100)


@dataclass(frozen=True)
class _Options:
    """What a layer has: the output is an operand, float32, or float32 with a residual."""

    bias: bool
    output: str
    dropout: float
    sizes: _Sizes = _ODD
    adapter: bool = True


@each(
    (_Options(True, "residual", 0.3),),
    (_Options(False, "residual", 0.0, _LARGE),),
    (_Options(False, "residual", 0.0, _WHOLE),),
    (_Options(False, "operand", 0.3, _LARGE),),
    (_Options(True, "operand", 0.0),),
    (_Options(True, "float32", 0.3),),
    (_Options(False, "float32", 0.0),),
    (_Options(False, "float32", 0.0, adapter=False),),
    (_Options(False, "operand", 0.0, adapter=False),),
    (_Options(True, "residual", 0.0, adapter=False),),
    (_Options(True, "residual", 0.3, _DEEP),),
    (_Options(True, "operand", 0.0, _DEEP),),
    (_Options(False, "operand", 0.3, _WIDE),),
    (_Options(False, "float32", 0.0, _WIDE),),
    (_Options(False, "operand", 0.0, _VAST, adapter=False),),
)
def check_linear(run: Runner, options: _Options) -> None:
    """Two layers of one input, in two shards: y, the sum of dx, and the adapter's gradient.

    Dropout is on for the first one only, as it is off in evaluation.
    """
    s, g = options.sizes, run.graph
    specs = [LinearSpec(name, s.outer, s.inner) for name in _NAMES]
    config = LoraConfig(r=s.r, lora_alpha=2 * s.r, lora_dropout=options.dropout)
    adapter, parts = filled_adapter(config, specs)
    x, skip = normal("x", s.rows, s.inner), normal("skip", s.rows, s.outer)
    bias = normal("bias", s.outer) * options.bias
    tx, tskip = run.operand(x, grad=True), run.float32(skip, grad=True)
    mask = np.ones((1, s.rows), np.int64)
    batches = run.batch(mask, dropout_key=KEY), run.batch(mask)
    residual = tskip if options.output == "residual" else None
    ys: list[Tensor] = []
    for name, batch in zip(_NAMES, batches, strict=True):
        lora = adapter.loras[name] if options.adapter else None
        pieces = _pieces(run, normal(f"w of {name}", s.outer, s.inner), s.shard)
        tbias = run.float32(bias) if options.bias else None
        layer = Linear(name, DenseMatrix(s.outer, s.inner, pieces), tbias, lora)
        exact_type = options.output == "float32"
        ys.append(linear(g, tx, layer, batch, residual, float32=exact_type))
    dys = [normal(f"dy of {name}", s.rows, s.outer) for name in _NAMES]
    g.add_gradient(ys[1], run.operand(dys[1]))
    dx, *dskip = run.gradients(ys[0], run.float32(dys[0]), tx, *([residual] if residual else []))
    flat = whole_gradient(adapter)
    got_x, *got = run.run(dx, *ys, *dskip, *([flat] if options.adapter else []))
    expected = _two_layers(run, options, adapter, parts, x, bias, dys)
    for y, value, exact in zip(ys, got, expected.ys, strict=False):
        run.compare(value, exact + (skip if residual else 0.0), y.dtype)
    run.compare(got_x, expected.dx)
    if residual:
        run.compare(got[2], dys[0] + run.rounded(dys[1]))
    if options.adapter:
        run.compare(got[-1], joined(adapter, expected.gradients))


@dataclass(frozen=True)
class _Expected:
    ys: list[Array]
    dx: Array
    gradients: dict[str, Array]


def _two_layers(
    run: Runner,
    options: _Options,
    adapter: AdapterLayout,
    parts: dict[str, Array],
    x: Array,
    bias: Array,
    dys: list[Array],
) -> _Expected:
    s, x = options.sizes, run.rounded(x)
    ys, total = [], np.zeros_like(x)
    gradients: dict[str, Array] = {}
    for name, dy in zip(_NAMES, dys, strict=True):
        names = [n for n in parts if name in n]
        a, b = (parts[n] * options.adapter for n in names)
        w, key = (
            run.rounded_weight(normal(f"w of {name}", s.outer, s.inner)),
            adapter.loras[name].key,
        )
        mask = np.ones_like(x)
        if options.dropout and name == _NAMES[0]:
            drawn = (s.rows, padded(s.inner), s.inner, options.dropout, KEY, key)
            mask = linear_reference.dropout_mask(*drawn)
        ys.append(linear_reference.linear(x, w, a, b, 2.0, mask, bias))
        dx, da, db = grads(
            linear_reference.linear, run.rounded(dy), x, w, a, b, 2.0, mask, of=(0, 2, 3)
        )
        total += dx
        gradients |= dict(zip(names, (da, db), strict=True))
    return _Expected(ys, total, gradients)


def _pieces(run: Runner, w: Array, rows: int) -> tuple[tuple[int, Tensor], ...]:
    """A matrix in shards of so many rows."""
    return tuple((i, run.weight(w[i : i + rows])) for i in range(0, len(w), rows))


@each(
    (_ODD, 0.3, True),
    (_NARROW, 0.3, True),
    (_LARGE, 0.0, True),
    (_LARGE, 0.0, False),
    (_WIDE, 0.0, True),
    (_WIDE, 0.3, True),
    (_WIDE, 0.0, False),
    (_LONG, 0.3, True),
    (_LONGER, 0.0, True),
)
def check_only_use(run: Runner, s: _Sizes, dropout: float, adapted: bool) -> None:
    """A layer whose input goes nowhere else: dx is made in its type, and the adapter's gradient."""
    name, x, dy = _NAMES[0], normal("x", s.rows, s.inner), normal("dy", s.rows, s.outer)
    config = LoraConfig(r=s.r, lora_alpha=2 * s.r, lora_dropout=dropout)
    adapter, parts = filled_adapter(config, [LinearSpec(name, s.outer, s.inner)])
    w = normal("w", s.outer, s.inner)
    lora = adapter.loras[name]
    pieces = _pieces(run, w, s.outer)
    layer = Linear(name, DenseMatrix(s.outer, s.inner, pieces), None, lora if adapted else None)
    tx = run.operand(x, grad=True)
    y = linear(run.graph, tx, layer, run.batch(np.ones((1, s.rows), np.int64), dropout_key=KEY))
    (dx,) = run.gradients(y, run.float32(dy), tx)
    got_x, *got = run.run(dx, *([whole_gradient(adapter)] if adapted else []))
    x, dy = run.rounded(x), run.rounded(dy)
    mask = np.ones_like(x)
    if dropout:
        drawn = (s.rows, padded(s.inner), s.inner, dropout, KEY, lora.key)
        mask = linear_reference.dropout_mask(*drawn)
    a, b = (part * adapted for part in parts.values())
    exact_x, da, db = grads(
        linear_reference.linear, dy, x, run.rounded_weight(w), a, b, 2.0, mask, of=(0, 2, 3)
    )
    run.compare(got_x, exact_x, dx.dtype)
    if adapted:
        run.compare(got[0], joined(adapter, dict(zip(parts, (da, db), strict=True))))


def check_long_product(run: Runner) -> None:
    """A reduction that GPUs cut into parts, and an input whose gradients are added up."""
    rows, inner, outer = 3, 20, 2500
    x, w = normal("x", rows, inner), normal("w", outer, inner)
    dys = normal("dy", rows, outer), normal("dz", rows, outer)
    layer = Linear("x", DenseMatrix(outer, inner, ((0, run.weight(w)),)), None, None)
    tx, batch = run.operand(x, grad=True), run.batch(np.ones((1, rows), np.int64))
    for dy in dys:
        y = linear(run.graph, tx, layer, batch)
        run.graph.add_gradient(y, run.float32(dy))
    run.graph.backward()
    (got,) = run.run(run.graph.gradient_of(tx))
    run.compare(got, sum(run.rounded(dy) for dy in dys) @ run.rounded_weight(w))


@each((True,), (False,))
def check_norm_between_long_products(run: Runner, has_residual: bool) -> None:
    """A norm of a product that GPUs make in parts, whose gradient comes in parts, too."""
    rows, inner, width, g = 5, 1100, 100, run.graph
    x, skip = normal("x", rows, inner), normal("skip", rows, width) * has_residual
    first, second = normal("first", width, inner), normal("second", inner, width)
    weight, dz = normal("weight", width), normal("dz", rows, inner)
    layers = [
        Linear(name, DenseMatrix(len(w), w.shape[1], ((0, run.weight(w)),)), None, None)
        for name, w in (("first", first), ("second", second))
    ]
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
    run.compare(got_dh, dh_exact, inner=ROUNDING[run.dtype])  # of dy, where it comes as a whole


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
    """Layers of one input: every y, the sum of dx, and the gradients of all A and B.

    Args:
        run: Where it runs.
        outer: Columns of the results.
        inner: Columns of the input.
        r: The rank of each adapter; 0 for none.
        float32: How many results are float32.
        has_bias: Whether there are biases.
        rows: Rows of the input; with many a workgroup makes more of the adapters' thin products.
    """
    g = run.graph
    g.profile = replace(g.profile, fused_linears=True)
    outer = outer[: most_layers(g, with_bias=has_bias, with_lora=r > 0)]
    names = [f"model.layers.0.{name}_proj" for name in "qkv"[: len(outer)]]
    specs = [LinearSpec(n, columns, inner) for n, columns in zip(names, outer, strict=True)]
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1)), specs)
    layers, weights = [], []
    for index, spec in enumerate(specs):
        stored = quantize_nf4(
            normal(f"w of {spec.name}", spec.out_features, inner).astype(np.float32), 64, index != 1
        )
        lora = adapter.loras[spec.name] if r else None
        weight = quantized_matrix(spec.name, stored, textures=g.profile.textures)
        layers.append(Linear(spec.name, weight, None, lora))
        weights.append(run.rounded_weight(stored.dequantize().astype(np.float64)))
    biases = [normal(f"bias of {name}", n) * has_bias for name, n in zip(names, outer, strict=True)]
    if has_bias:
        tensors = in_one_storage(biases)
        pairs = zip(layers, tensors, strict=True)
        layers = [replace(layer, bias=bias) for layer, bias in pairs]
    x, batch = normal("x", rows, inner), run.batch(np.ones((1, rows), np.int64))
    tx = run.operand(x, grad=True)
    flags = [index < float32 for index in range(len(outer))]
    ys = linear_group(g, tx, layers, batch, flags)
    dys = [normal(f"dy of {name}", rows, y.columns) for name, y in zip(names, ys, strict=True)]
    for y, dy in zip(ys, dys, strict=True):
        g.add_gradient(y, run.float32(dy))
    g.backward()
    flat = [whole_gradient(adapter)] if r else []
    gradient = g.gradient_of(tx)
    got_x, *got = run.run(gradient, *ys, *flat)
    x, total = run.rounded(x), np.zeros_like(x)
    gradients: dict[str, Array] = {}
    for index, (name, w, dy) in enumerate(zip(names, weights, dys, strict=True)):
        own = [n for n in parts if name in n]
        a, b = (parts[n] * (r > 0) for n in own)
        mask = np.ones_like(x)
        exact = linear_reference.linear(x, w, a, b, 2.0, mask, biases[index])
        run.compare(got[index], exact, ys[index].dtype)
        dx, da, db = grads(
            linear_reference.linear, run.rounded(dy), x, w, a, b, 2.0, mask, of=(0, 2, 3)
        )
        total += dx
        gradients |= dict(zip(own, (da, db), strict=True))
    run.compare(got_x, total, gradient.dtype)
    if r:
        run.compare(got[-1], joined(adapter, gradients))


def in_one_storage(arrays: list[Array]) -> list[Tensor]:
    """Vectors, each where a binding may begin."""
    begins = np.cumsum([0, *(round_up(len(array), ALIGNMENT // 4) for array in arrays)])
    data = np.zeros(begins[-1], np.float32)
    storage = Storage("biases", "check", data.nbytes, data)
    tensors = []
    for array, begin in zip(arrays, begins.tolist(), strict=False):
        data[begin : begin + len(array)] = array
        tensors.append(vector("bias", len(array), "float32", storage, 4 * begin))
    return tensors


@each((True, "residual"), (False, "operand"), (True, "operand"), (False, "residual"),
      (False, "float32"), (True, "float32"), (True, "residual", 0.3),
      (False, "operand", 0.3))  # fmt: skip
def check_dora(run: Runner, has_bias: bool, output: str, dropout: float = 0.0) -> None:
    """Two layers of one input: y, the sum of dx, and the gradients of A, B and the magnitudes.

    The input is small, so that roundings of the sums are, too, and hide no summand.
    """
    rows, inner, outer, g = ROWS, 530, 83, run.graph
    specs = [LinearSpec(name, outer, inner) for name in _NAMES]
    lora = LoraConfig(r=3, lora_alpha=6, use_dora=True, lora_dropout=dropout)
    adapter, parts = filled_adapter(lora, specs)
    x, skip = 0.05 * normal("x", rows, inner), normal("skip", rows, outer)
    bias, tx = normal("bias", outer) * has_bias, run.operand(x, grad=True)
    tbias = run.float32(bias) if has_bias else None
    residual = run.float32(skip) if output == "residual" else None
    batch = run.batch(np.ones((1, rows), np.int64), dropout_key=KEY if dropout else None)
    ys = []
    for name in _NAMES:
        w = normal(f"w of {name}", outer, inner)
        pieces = tuple((i, run.weight(w[i : i + 48])) for i in range(0, outer, 48))
        layer = Linear(name, DenseMatrix(outer, inner, pieces), tbias, adapter.loras[name])
        ys.append(linear(g, tx, layer, batch, residual, float32=output == "float32"))
    dys = [normal(f"dy of {name}", rows, outer) for name in _NAMES]
    g.add_gradient(ys[1], run.operand(dys[1]))
    (dx,) = run.gradients(ys[0], run.float32(dys[0]), tx)
    *got, got_x, got_flat = run.run(*ys, dx, whole_gradient(adapter))
    x, total = run.rounded(x), np.zeros_like(x)
    gradients: dict[str, Array] = {}
    for name, y, value, dy in zip(_NAMES, ys, got, (dys[0], run.rounded(dys[1])), strict=True):
        names = [n for n in parts if name in n]
        a, b, m = (parts[n] for n in names)
        w, mask = run.rounded_weight(normal(f"w of {name}", outer, inner)), np.ones_like(x)
        if dropout:
            key = adapter.loras[name].key
            mask = linear_reference.dropout_mask(rows, padded(inner), inner, dropout, KEY, key)
        kept, rest = (run.rounded(part) for part in linear_reference.dropout_parts(x, mask))
        norms, ones = linear_reference.dora_norm(w, a, b, 2.0), np.ones_like(x)
        z = linear_reference.linear(kept, w, a, b, 2.0, ones)
        scaled = linear_reference.dora(z, m, norms)
        exact = scaled + rest @ w.T + bias + (skip if residual else 0.0)
        # What is scaled is an operand.
        run.compare(value, exact, y.dtype, inner=ROUNDING[run.dtype] * np.abs(scaled))
        dz, dm = grads(linear_reference.dora, dy, z, m, norms, of=2)
        d_kept, da, db = grads(
            linear_reference.linear, run.rounded(dz), kept, w, a, b, 2.0, ones, of=(0, 2, 3)
        )
        total += grad(linear_reference.dropout_parts, (d_kept, run.rounded(dy) @ w), x, mask)
        gradients |= dict(zip(names, (da, db, dm), strict=True))
    rounding = ROUNDING[run.dtype] / 2  # of sums
    run.compare(got_x, total, inner=rounding)
    run.compare(got_flat, joined(adapter, gradients), inner=rounding)


@each((True,), (False,))
def check_dora_norms(run: Runner, plain: bool) -> None:
    """Norms of shards of rows, or one by them; of a row of zeros that is zero."""
    rows, inner, name = 300, 530, _NAMES[0]
    w = normal("w", rows, inner)
    adapter, parts = filled_adapter(
        LoraConfig(r=3, lora_alpha=6, use_dora=True), [LinearSpec(name, rows, inner)]
    )
    out = run.graph.float_vector("norms", rows)
    for first, block in row_blocks(run.weight(w), 256):
        dora.norm(run.graph, block, adapter.loras[name], out, first, 2.0, plain=plain)
    a, b, _ = parts.values()
    (got,) = run.run(out)
    exact = linear_reference.dora_norm(run.rounded_weight(w), a, b, 2.0)
    run.compare(got[0], exact if plain else 1 / exact)


@each((True,), (False,))
def check_dropout_parts(run: Runner, in_operands: bool) -> None:
    """An input in two, and the gradients of both in one."""
    shape, g = (ROWS, 75), run.graph
    given = run.operand if in_operands else run.float32
    rounded = run.rounded if in_operands else np.asarray
    x, tx = run.rounded(normal("x", *shape)), run.operand(normal("x", *shape), grad=True)
    batch = run.batch(np.ones((1, ROWS), np.int64), dropout_key=KEY)
    kept, rest = dropout_parts(g, tx, DropoutMask(0.3, 7), batch)
    dkept, drest = normal("dkept", *shape), normal("drest", *shape)
    g.add_gradient(kept, given(dkept))
    (dx,) = run.gradients(rest, given(drest), tx)
    mask = linear_reference.dropout_mask(ROWS, padded(75), 75, 0.3, KEY, 7)
    exact = grad(linear_reference.dropout_parts, (rounded(dkept), rounded(drest)), x, mask)
    for got, expected in zip(
        run.run(kept, rest, dx), (*linear_reference.dropout_parts(x, mask), exact), strict=True
    ):
        run.compare(got, expected, run.dtype)
