"""Inputs that checks share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.ops.tensor import as_operand
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.runner import Array, Runner, rounded

CheckT = TypeVar("CheckT", bound=Callable[..., None])

ROWS = 37
ONES = np.ones((1, ROWS), np.int64)
# A sample that ends with its row, and one in the next row: only the row distinguishes them.
SAMPLES = np.array([19 * [1], 8 * [1] + 11 * [2]])
KEY = 12345  # of dropout


def each(*arguments: tuple[Any, ...]) -> Callable[[CheckT], CheckT]:
    """Runs a check once with each of these arguments."""

    def mark(check: CheckT) -> CheckT:
        vars(check)["arguments"] = arguments
        return check

    return mark


def arguments_of(check: Callable[..., None]) -> tuple[tuple[Any, ...], ...]:
    """A check's arguments; a single empty tuple if it is not decorated."""
    marked: tuple[tuple[Any, ...], ...] = vars(check).get("arguments", ((),))
    return marked


def normal(name: str, *shape: int) -> Array:
    """Normal numbers seeded by a name."""
    return _drawn(name, shape).copy()


@lru_cache(64)  # a check in textures uses the same numbers as in buffers
def _drawn(name: str, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def no_ties(name: str, *shape: int) -> Array:
    """Normal numbers without ties in float16, which kernels round up."""
    numbers = normal(name, *shape).astype(np.float32)
    return (numbers.view(np.uint32) | 1).view(np.float32).astype(np.float64)


def uneven(name: str, rows: int, columns: int) -> Array:
    """Normal numbers with rows of different magnitudes, so small that a norm's ε matters."""
    sizes = np.array([1.0, 2e-3, 30.0])[np.arange(rows) % 3, None]
    scaled: Array = normal(name, rows, columns) * sizes
    return scaled


def filled_adapter(
    config: LoraConfig,
    linears: list[LinearSpec],
    experts: list[ExpertSpec] | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[AdapterLayout, dict[str, Array]]:
    """An adapter of normal numbers with a gradient of ones, and its parts in float32."""
    adapter = AdapterLayout(config, linears, experts or [], vocabulary=vocabulary)
    parts = adapter.split(adapter.initial(0))
    values = {n: normal(n, *a.shape).astype(np.float32) for n, a in parts.items()}
    flat = adapter.join(values)
    for vector, data in ((adapter.parameters, flat), (adapter.gradient, np.ones_like(flat))):
        (storage,) = vector.storages
        storage.data = data
    return adapter, {name: array.astype(np.float64) for name, array in values.items()}


def whole_gradient(adapter: AdapterLayout) -> Tensor:
    return matrix("gradient", 1, adapter.length, "float32", adapter.gradient.whole.storage)


def joined(adapter: AdapterLayout, gradients: dict[str, Array]) -> Array:
    values = {name: array.astype(np.float32) for name, array in gradients.items()}
    return adapter.join(values)[None].astype(np.float64) + 1.0


def of_halves(run: Runner) -> float:
    """The tolerance for attention with float16 factors, relative to the largest value.

    On matrix units each factor is off by at most half a unit in the last place, 2⁻¹¹ of itself, and
    so sums of products of two by 2⁻¹⁰ of their size.
    """
    halved = any(launch.constants.get("HALF") is True for launch in run.graph.launches)
    return 2.0**-10 * halved


Adapter = tuple[AdapterLayout, dict[str, Array]]
Formula = Callable[..., Any]


def of_names(parts: Mapping[str, Array], name: str) -> list[Array]:
    return [part for own, part in parts.items() if name in own]


class Exact(NamedTuple):
    """A float32 input instead of an operand."""

    array: Array


def compare_op(
    run: Runner,
    op: Callable[..., Tensor | Sequence[Tensor]],
    formula: Formula,
    inputs: Sequence[Array | Exact],
    *rest: object,
    exact: bool | Sequence[bool | None] | None,
    dy: Array | None = None,
    adapter: Adapter | None = None,
    by_row: bool = False,
    stores: bool = False,
    copies: bool = False,
    casts: bool = False,
    inner: float = 0.0,
    inner_ys: Sequence[Array] = (),
    inner_dxs: Sequence[float | Array] = (),
) -> list[Array]:
    """Compares an op and its gradients with a formula and its gradients; returns the results.

    Args:
        run: Runs it.
        op: Takes the graph, the inputs as operands, and the rest; returns one result or more.
        formula: Takes the same arrays, without a graph, and with an adapter its ``parts`` by name.
        inputs: The inputs with gradients.
        *rest: The inputs without: arrays become float32, others are passed unchanged.
        exact: For each result, whether its gradient is float32 instead of an operand; None for no
            gradient.
        dy: The gradient of the results; normal numbers by default.
        adapter: An adapter that op applies; its flat gradient starts with ones.
        by_row: Whether errors are relative to each row's largest value.
        stores: Whether gradients are those of the stored result, as in attention, whose factors
            may be float16.
        copies: Whether results must be bit-exact.
        casts: Whether the first gradient is also read as an operand.
        inner: The tolerance for roundings of intermediates, relative to the largest value.
        inner_ys: The same for each result's elements.
        inner_dxs: The same for each gradient.
    """
    values = [array.array if isinstance(array, Exact) else array for array in inputs]
    tensors = [
        (run.float32 if isinstance(kind, Exact) else run.operand)(array, grad=True)
        for kind, array in zip(inputs, values, strict=True)
    ]
    frozen = [run.float32(x) if isinstance(x, np.ndarray) else x for x in rest]
    made = op(run.graph, *tensors, *frozen)
    ys = [made] if isinstance(made, Tensor) else list(made)
    kinds = [exact] * len(ys) if exact is None or isinstance(exact, bool) else exact
    dys = []
    for n, (y, kind) in enumerate(zip(ys, kinds, strict=True)):
        given = normal(f"dy{n or ''}", *y.shape) if dy is None else dy
        if kind is None:
            given = np.zeros(y.shape)
        else:
            run.graph.add_gradient(y, (run.float32 if kind else run.operand)(given))
        dys.append(rounded(given, "float32" if kind else run.dtype))
    gradients, (layout, parts) = list[Tensor](), adapter or (None, {})
    has_backward = any(kind is not None for kind in kinds)
    if has_backward:
        run.graph.backward()
        gradients = [run.graph.gradient_of(x) for x in tensors]
    flat = [whole_gradient(layout)] if layout and has_backward else []
    flat += [as_operand(run.graph, gradients[0])] if casts else []
    inner = max(inner, of_halves(run)) if stores else inner
    got = run.run(*ys, *gradients, *flat)
    got_ys, got = got[: len(ys)], got[len(ys) :]

    def named(*args: Array, **stored: Array) -> tuple[Array, ...]:
        own = {"parts": dict(zip(parts, args[len(values) :], strict=True))} if adapter else {}
        result = formula(*args[: len(values)], *rest, **own, **stored)
        return result if isinstance(result, tuple) else (result,)

    held = [rounded(x, t.dtype) for x, t in zip(values, tensors, strict=True)] + [*parts.values()]
    for n, (y, found, expected) in enumerate(zip(ys, got_ys, named(*held), strict=True)):
        if copies or y.dtype == "uint32":
            run.compare_exactly(found, expected)
        else:
            allowed = inner_ys[n] if inner_ys else inner
            run.compare(found, expected, y.dtype, by_row=by_row, inner=allowed)
    if has_backward:
        kept = {"stored": got_ys[0]} if stores else {}
        exact_dxs = grads(named, dys, *held, of=len(held), **kept)
        for n, (found, gradient) in enumerate(zip(got, gradients, strict=False)):
            near = inner_dxs[n] if inner_dxs else inner
            run.compare(found, exact_dxs[n], gradient.dtype, by_row=by_row, inner=near)
        if casts:
            run.compare_exactly(got[-1], run.rounded(got[0]))
        if layout:
            by_name = dict(zip(parts, exact_dxs[len(gradients) :], strict=True))
            run.compare(got[-1], joined(layout, by_name), inner=inner)
    return got_ys
