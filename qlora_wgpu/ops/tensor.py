"""Zeroing, copying, converting, merging and adding whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.sharded_vector import ShardedVector, as_sharded
from qlora_wgpu.graph.tensor import ROW_UNIT, TEXEL, Storage, Tensor, ceil_div, matrix, vector


def fill_zero(g: Graph, y: Tensor | ShardedVector) -> None:
    for shard in as_sharded(y).shards:
        units = ceil_div(shard.nbytes, 16)
        g.launch("tensor/fill.wgsl", units, {"y": shard})


def copied(g: Graph, x: Tensor) -> Tensor:
    """A copy of a matrix, possibly in the other kind of memory; not differentiable."""
    y = matrix(x.name, x.rows, x.columns, x.dtype)
    units = ceil_div(x.nbytes, TEXEL)
    g.launch("tensor/copy.wgsl", units, {"x": x, "y": y})
    return y


def add_to(g: Graph, y: Tensor | ShardedVector, x: Tensor | ShardedVector) -> None:
    """Adds x, float32, to y, which has the same shards.

    y is float32, or a part of a bfloat16 vector with its own storage, rounded to nearest even.
    """
    for to, part in zip(as_sharded(y).shards, as_sharded(x).shards, strict=True):
        if to.dtype == "bfloat16":
            _add_rounded(g, to, part)
            continue
        units = to.rows * to.units(8)
        tensors = {"y": to, "a": None, "b": part}
        g.launch("tensor/add.wgsl", units, tensors, constants={"ACCUMULATE": True})


def _add_rounded(g: Graph, y: Tensor, x: Tensor) -> None:
    """Binds the whole vector, since its parts are not aligned for bindings."""
    assert y.storage is not None
    whole = vector(y.name, y.storage.nbytes // 4, "uint32", y.storage)
    units = x.rows * x.units(4)
    params = {"units": units, "first": y.offset // 8}
    g.launch("tensor/add_rounded.wgsl", units, {"x": x, "y": whole}, params)


def one_below_the_other(xs: Sequence[Tensor]) -> Tensor | None:
    """Adjacent matrices of one storage as one; None if they are not adjacent."""
    begins = accumulate((x.nbytes for x in xs), initial=xs[0].offset)
    if any(
        x.storage is not xs[0].storage or x.offset != at for x, at in zip(xs, begins, strict=False)
    ):
        return None
    return replace(xs[0], rows=sum(x.rows for x in xs))


def in_words(x: Tensor) -> Tensor:
    """A bfloat16 vector of even length as words that kernels change in place."""
    count = x.columns // 2
    return replace(x, columns=count, stride=count, dtype="uint32")


@contextmanager
def summed(g: Graph, total: Tensor) -> Iterator[Tensor]:
    """A float32 accumulator of a gradient: itself, or zeros that are added to it at the end."""
    if total.dtype == "float32":
        yield total
        return
    part = replace(total, name=f"part of {total.name}", dtype="float32", storage=None, offset=0)
    fill_zero(g, part)
    yield part
    add_to(g, total, part)


def converted(g: Graph, x: Tensor, dtype: str) -> Tensor:
    """Returns x in another element type: itself, or a copy; not differentiable."""
    if x.dtype == dtype:
        return x
    y = matrix(f"{x.name} as {dtype}", x.rows, x.columns, dtype)
    units = x.rows * x.units(8)
    g.launch("tensor/convert.wgsl", units, {"x": x, "y": y})
    return y


def as_operand(g: Graph, x: Tensor) -> Tensor:
    """x in the graph's element type, for products; not differentiable."""
    return converted(g, x, g.dtype)


def cast(g: Graph, x: Tensor, dtype: str | None = None) -> Tensor:
    """A matrix in another element type, the graph's by default; differentiable."""
    y = converted(g, x, dtype or g.dtype)
    if y is not x:
        g.record(y, [x], lambda dy: g.add_gradient(x, dy), grad_dtype=x.dtype)
    return y


def as_float32(g: Graph, x: Tensor) -> Tensor:
    return cast(g, x, "float32")


def merged_rows(g: Graph, x: Tensor, count: int) -> Tensor:
    """Every ``count`` rows of x as one row, of x's type; not differentiable."""
    if x.rows % count or x.columns % ROW_UNIT:
        raise GraphError(f"merged_rows: {x} has no whole rows of {count}")
    storage = Storage(f"merged {x.name}", "activations", x.nbytes)
    y = matrix(x.name, x.rows, x.columns, x.dtype, storage)
    g.launch("tensor/copy.wgsl", ceil_div(x.nbytes, TEXEL), {"x": x, "y": y})
    return matrix(storage.label, x.rows // count, count * x.columns, x.dtype, storage)


def mean_of_rows(g: Graph, x: Tensor, count: int) -> Tensor:
    """The mean of every ``count`` rows of x, float32; not differentiable."""
    if x.rows % count:
        raise GraphError(f"mean_of_rows: {x} has no whole groups of {count} rows")
    y = g.float32(f"mean of {x.name}", x.rows // count, x.columns)
    g.launch("rows/mean.wgsl", y.rows * y.units(8), {"x": x, "y": y}, {"count": count})
    return y


def clamped(g: Graph, x: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """x within two stored numbers, of x's type; not differentiable."""
    if not lowest.shape == highest.shape == (1, 1):
        raise GraphError(f"clamped: {lowest} and {highest} must be numbers")
    y = matrix(f"clamped {x.name}", x.rows, x.columns, x.dtype)
    tensors = {"x": x, "lowest": lowest, "highest": highest, "y": y}
    g.launch("tensor/clamp.wgsl", x.rows * x.units(8), tensors)
    return y


def standardized(g: Graph, x: Tensor, bias: Tensor, scale: Tensor, factor: float) -> Tensor:
    """(factor · x - bias) · scale by column, float32; not differentiable."""
    if not x.columns == bias.columns == scale.columns:
        raise GraphError(f"standardized: {bias} and {scale} do not fit {x}")
    y = g.float32(f"standardized {x.name}", x.rows, x.columns)
    tensors = {"x": x, "bias": bias, "scale": scale, "y": y}
    g.launch("rows/standardize.wgsl", x.rows * x.units(8), tensors, {"factor": factor})
    return y


def softcap_in_place(g: Graph, y: Tensor, cap: float) -> None:
    """y = cap · tanh(y / cap), float32."""
    units = y.rows * y.units(4)
    g.launch("tensor/softcap.wgsl", units, {"y": y}, {"cap": cap})
