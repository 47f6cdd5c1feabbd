"""Inputs that checks share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.runner import Array, Runner, rounded

CheckT = TypeVar("CheckT", bound=Callable[..., None])

ROWS = 37
ONES = np.ones((1, ROWS), np.int64)
# A sample that ends with its row, and the next row's, which are told apart by the rows alone.
SAMPLES = np.array([19 * [1], 8 * [1] + 11 * [2]])
KEY = 12345  # of dropout


def each(*arguments: tuple[Any, ...]) -> Callable[[CheckT], CheckT]:
    """Marks a check that is run once with each of these arguments."""

    def mark(check: CheckT) -> CheckT:
        vars(check)["arguments"] = arguments
        return check

    return mark


def arguments_of(check: Callable[..., None]) -> tuple[tuple[Any, ...], ...]:
    """What a check is run with; nothing, once, if it is not marked."""
    marked: tuple[tuple[Any, ...], ...] = vars(check).get("arguments", ((),))
    return marked


def normal(name: str, *shape: int) -> Array:
    """Normal numbers that follow from a name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def no_ties(name: str, *shape: int) -> Array:
    """Normal numbers, none as near to two of float16, of which kernels take the larger one."""
    numbers = normal(name, *shape).astype(np.float32)
    return (numbers.view(np.uint32) | 1).view(np.float32).astype(np.float64)


def uneven(name: str, rows: int, columns: int) -> Array:
    """Normal numbers whose rows are of several sizes, so small that a norm's ε counts, too."""
    sizes = np.array([1.0, 2e-3, 30.0])[np.arange(rows) % 3, None]
    scaled: Array = normal(name, rows, columns) * sizes
    return scaled


def filled_adapter(
    config: LoraConfig,
    linears: list[LinearSpec],
    experts: list[ExpertSpec] | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[AdapterLayout, dict[str, Array]]:
    """An adapter of normal numbers, its gradient so far one; and its parts in float32."""
    adapter = AdapterLayout(config, linears, experts or [], vocabulary=vocabulary)
    parts = adapter.split(adapter.initial(0))
    values = {n: normal(n, *a.shape).astype(np.float32) for n, a in parts.items()}
    flat = adapter.join(values)
    for vector, data in ((adapter.parameters, flat), (adapter.gradient, np.ones_like(flat))):
        (storage,) = vector.storages
        storage.data = data
    return adapter, {name: array.astype(np.float64) for name, array in values.items()}


def whole_gradient(adapter: AdapterLayout) -> Tensor:
    """The flat vector of an adapter's gradients."""
    return matrix("gradient", 1, adapter.length, "float32", adapter.gradient.whole.storage)


def joined(adapter: AdapterLayout, gradients: dict[str, Array]) -> Array:
    """The flat vector that was one before these gradients, by names, were added to it."""
    values = {name: array.astype(np.float32) for name, array in gradients.items()}
    return adapter.join(values)[None].astype(np.float64) + 1.0


def of_halves(run: Runner) -> float:
    """What attention's factors of float16 allow, as a share of the largest value, if it has such.

    On matrix units each is off by half of its last place at most, 2⁻¹¹ of itself, either way: sums
    of products of two, by 2⁻¹⁰ of what such sums are.
    """
    halved = any(launch.constants.get("HALF") is True for launch in run.graph.launches)
    return 2.0**-10 * halved


def of_types(
    run: Runner, rounded_first: bool
) -> tuple[Callable[[Array], Tensor], Callable[[Array], Tensor]]:
    """What makes the first gradient, and the second one."""
    return (run.operand, run.float32) if rounded_first else (run.float32, run.operand)


class Exact(NamedTuple):
    """An input of float32, not an operand."""

    array: Array


def compare_op(
    run: Runner,
    op: Callable[..., Tensor],
    formula: Callable[..., Array],
    inputs: Sequence[Array | Exact],
    *rest: object,
    exact: bool,
    dy: Array | None = None,
    by_row: bool = False,
    stores: bool = False,
) -> None:
    """Compares an op and the gradients of its inputs with a formula and its own.

    Args:
        run: Where it runs.
        op: Takes the graph, the inputs, which are operands, and the rest.
        formula: Takes the same arrays, without a graph.
        inputs: What gets gradients.
        *rest: What gets none: arrays are of float32, other things are as they are.
        exact: Whether the gradient of the result is float32, not an operand.
        dy: That gradient; normal numbers by default.
        by_row: Whether each row is measured by its own largest value.
        stores: Whether gradients follow from the result as it was stored.
    """
    given = [array.array if isinstance(array, Exact) else array for array in inputs]
    tensors = [
        (run.float32 if isinstance(kind, Exact) else run.operand)(array, grad=True)
        for kind, array in zip(inputs, given, strict=True)
    ]
    frozen = [run.float32(x) if isinstance(x, np.ndarray) else x for x in rest]
    y = op(run.graph, *tensors, *frozen)
    dy = normal("dy", y.rows, y.columns) if dy is None else dy
    gradients = run.gradients(y, (run.float32 if exact else run.operand)(dy), *tensors)
    inner = of_halves(run)
    got_y, *got = run.run(y, *gradients)
    held = [rounded(array, t.dtype) for array, t in zip(given, tensors, strict=True)]
    run.compare(got_y, formula(*held, *rest), y.dtype, by_row=by_row, inner=inner)
    dy = rounded(dy, "float32" if exact else run.dtype)
    kept = {"stored": got_y} if stores else {}
    expected = grads(formula, dy, *held, *rest, of=len(held), **kept)
    for value, dx, gradient in zip(got, expected, gradients, strict=True):
        run.compare(value, dx, gradient.dtype, by_row=by_row, inner=inner)
