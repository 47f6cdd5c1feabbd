"""Gradients of the reference formulas: reverse mode through NumPy's own functions.

A formula is called with ``Var`` instead of arrays, and NumPy dispatches each operation on them to
the tables below. Comparisons and sorting use plain arrays, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = Any
"""The formulas' inputs and results: float64, or a ``Var`` of it."""
_Pull = Callable[[Array], Array]  # from the gradient of a result to that of an input


def grads(
    f: Callable[..., Any], dy: Any, *args: Any, of: int | Sequence[int], **options: Any
) -> tuple[Array, ...]:
    """The gradients of Σ dy · f(args) with respect to some arguments."""
    places = range(of) if isinstance(of, int) else of
    inputs = {place: Var(args[place]) for place in places}
    made = f(*(inputs.get(i, a) for i, a in enumerate(args)), **options)
    pairs = zip(made, dy, strict=True) if isinstance(made, tuple) else [(made, dy)]
    ends = [(y, cotangent) for y, cotangent in pairs if isinstance(y, Var)]
    for y, cotangent in ends:
        y.gradient = y.gradient + np.broadcast_to(np.asarray(cotangent, np.float64), y.shape)
    for node in reversed(_in_order([y for y, _ in ends])):
        for parent, pull in node.parents:
            parent.gradient = parent.gradient + pull(node.gradient)
    return tuple(np.broadcast_to(x.gradient, x.shape).copy() for x in inputs.values())


def grad(f: Callable[..., Any], dy: Any, *args: Any, **options: Any) -> Array:
    """The gradient of Σ dy · f(args) with respect to the first argument."""
    return grads(f, dy, *args, of=1, **options)[0]


def constant(x: Any) -> Array:
    """The same numbers without a gradient."""
    return x.value if isinstance(x, Var) else np.asarray(x)


def through(x: Any, value: _Pull | None = None, gradient: _Pull | None = None) -> Any:
    """The same for an op that stores the value, or its gradient, in another type."""
    if not isinstance(x, Var):
        return x if value is None else value(x)
    return Var(x.value if value is None else value(x.value), [(x, gradient or (lambda g: g))])


def erfc(x: Any) -> Any:
    """The complementary error function, which NumPy lacks."""
    if isinstance(x, Var):
        slope = -2 / math.sqrt(math.pi) * np.exp(-(x.value**2))
        return Var(erfc(x.value), [(x, lambda g: g * slope)])
    return np.array([math.erfc(v) for v in np.ravel(x)]).reshape(np.shape(x))


class Var(NDArrayOperatorsMixin):
    """An array with the operands that it was computed from."""

    __array_priority__ = 1000

    def __init__(self, value: Any, parents: Sequence[tuple[Var, _Pull]] = ()) -> None:
        self.value = np.asarray(value, np.float64)
        self.parents = parents
        self.gradient: Any = 0.0
        self.shape, self.ndim, self.size = self.value.shape, self.value.ndim, self.value.size

    @property
    def T(self) -> Var:
        """As of an array."""
        return self.transpose()

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, at: Any) -> Var:
        def pull(g: Array) -> Array:
            whole = np.zeros(self.shape)
            if _takes_each_once(at):
                whole[at] = g
            else:
                np.add.at(whole, at, g)
            return whole

        return Var(self.value[at], [(self, pull)])

    def reshape(self, *shape: Any) -> Var:
        """As of an array."""
        return Var(self.value.reshape(*shape), [(self, lambda g: g.reshape(self.shape))])

    def transpose(self, *axes: int) -> Var:
        """As of an array."""
        order = axes or tuple(range(self.ndim))[::-1]
        back = np.argsort(order)
        return Var(self.value.transpose(order), [(self, lambda g: g.transpose(back))])

    def sum(self, axis: int | None = None, keepdims: bool = False) -> Var:
        """As of an array."""

        def pull(g: Array) -> Array:
            g = g if keepdims or axis is None else np.expand_dims(g, axis)
            return np.broadcast_to(g, self.shape)

        return Var(self.value.sum(axis=axis, keepdims=keepdims), [(self, pull)])

    def mean(self, axis: int | None = None, keepdims: bool = False) -> Var:
        """As of an array."""
        total = self.sum(axis, keepdims)
        return total * (total.size / max(self.size, 1))  # type: ignore[no-any-return]

    def max(self, axis: int | None = None, keepdims: bool = False) -> Array:
        """A plain array: formulas subtract it and add it again."""
        return np.asarray(self.value.max(axis=axis, keepdims=keepdims))

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        assert method == "__call__", f"the tape does not know np.{ufunc.__name__}.{method}"
        values = [x.value if isinstance(x, Var) else np.asarray(x) for x in given]
        y = ufunc(*values, **options)
        if y.dtype == bool:
            return y
        slopes = _UFUNCS.get(ufunc)
        assert slopes is not None, f"the tape does not know np.{ufunc.__name__}: add its slope"
        return Var(y, [
            (x, lambda g, x=x, slope=slope: _fitted(slope(g, y, *values), x.shape))  # type: ignore[misc]
            for x, slope in zip(given, slopes, strict=True) if isinstance(x, Var)
        ])  # fmt: skip

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        known = _FUNCTIONS.get(function)
        assert known is not None, f"the tape does not know np.{function.__name__}: add it"
        return known(*args, **options)


def _in_order(ends: Sequence[Var]) -> list[Var]:
    """All intermediates of these, in topological order."""
    order, seen = list[Var](), set[int]()
    stack: list[tuple[Var, bool]] = [(end, False) for end in ends]
    while stack:
        node, is_made = stack.pop()
        if is_made:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node.parents]
    return order


def _takes_each_once(at: Any) -> bool:
    parts = at if isinstance(at, tuple) else (at,)
    return all(part is None or isinstance(part, int | slice | EllipsisType) for part in parts)


def _fitted(g: Array, shape: tuple[int, ...]) -> Array:
    """A gradient summed over what was broadcast."""
    if g.shape == shape:
        return g
    g = np.sum(g, axis=tuple(range(g.ndim - len(shape))))
    ones = tuple(i for i, n in enumerate(shape) if n == 1)
    return np.broadcast_to(np.sum(g, axis=ones, keepdims=True), shape)


# The gradients of the operands from g, the gradient of the result, the result and the operands.
_UFUNCS: dict[np.ufunc, tuple[Callable[..., Array], ...]] = {
    np.add: (lambda g, y, a, b: g, lambda g, y, a, b: g),
    np.subtract: (lambda g, y, a, b: g, lambda g, y, a, b: -g),
    np.multiply: (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    np.divide: (lambda g, y, a, b: g / b, lambda g, y, a, b: -g * y / b),
    np.negative: (lambda g, y, a: -g,),
    np.absolute: (lambda g, y, a: g * np.sign(a),),
    np.power: (lambda g, y, a, b: g * b * a ** (b - 1), lambda g, y, a, b: 0.0 * g),
    np.square: (lambda g, y, a: 2 * g * a,),
    np.exp: (lambda g, y, a: g * y,),
    np.expm1: (lambda g, y, a: g * (y + 1),),
    np.log: (lambda g, y, a: g / a,),
    np.tanh: (lambda g, y, a: g * (1 - y * y),),
    np.sqrt: (lambda g, y, a: g / (2 * y),),
    np.maximum: (lambda g, y, a, b: g * (a > b), lambda g, y, a, b: g * (b >= a)),
    np.minimum: (lambda g, y, a, b: g * (a <= b), lambda g, y, a, b: g * (b < a)),
    np.logaddexp: (lambda g, y, a, b: g * np.exp(a - y), lambda g, y, a, b: g * np.exp(b - y)),
    np.matmul: (
        lambda g, y, a, b: g @ np.swapaxes(b, -1, -2), lambda g, y, a, b: np.swapaxes(a, -1, -2) @ g
    ),
}  # fmt: skip


def _var(x: Any) -> Var:
    return x if isinstance(x, Var) else Var(x)


def _where(which: Any, a: Any, b: Any) -> Var:
    a, b = _var(a), _var(b)
    return Var(np.where(which, a.value, b.value), [
        (a, lambda g: _fitted(np.where(which, g, 0.0), a.shape)),
        (b, lambda g: _fitted(np.where(which, 0.0, g), b.shape)),
    ])  # fmt: skip


def _clip(x: Var, low: float, high: float) -> Var:
    kept = (x.value >= low) & (x.value <= high)
    return Var(np.clip(x.value, low, high), [(x, lambda g: g * kept)])


def _einsum(spec: str, *given: Any) -> Var:
    xs = [_var(x) for x in given]
    names, out = spec.split("->")[0].split(","), spec.split("->")[1]

    def pull_to(i: int) -> _Pull:
        others = [x.value for j, x in enumerate(xs) if j != i]
        back = ",".join([out, *names[:i], *names[i + 1 :]]) + "->" + names[i]
        return lambda g: np.asarray(np.einsum(back, g, *others))

    made = np.einsum(spec, *(x.value for x in xs))
    pulls = [(x, pull_to(i)) for i, x in enumerate(xs) if isinstance(given[i], Var)]
    return Var(made, pulls)


def _concatenate(given: Sequence[Any], axis: int = 0) -> Var:
    xs = [_var(x) for x in given]
    ends = np.cumsum([0, *(x.shape[axis] for x in xs)])
    before = (slice(None),) * axis

    def pull_to(i: int) -> _Pull:
        return lambda g: g[(*before, slice(ends[i], ends[i + 1]))]

    made = np.concatenate([x.value for x in xs], axis)
    return Var(made, [(x, pull_to(i)) for i, x in enumerate(xs)])


def _split(x: Var, count: int, axis: int = 0) -> list[Var]:
    size = x.shape[axis] // count
    before = (slice(None),) * axis
    return [x[(*before, slice(i * size, (i + 1) * size))] for i in range(count)]


def _repeat(x: Var, count: int, axis: int) -> Var:
    def pull(g: Array) -> Array:
        shape = (*x.shape[: axis + 1], count, *x.shape[axis + 1 :])
        return np.asarray(g.reshape(shape).sum(axis + 1))

    return Var(np.repeat(x.value, count, axis), [(x, pull)])


def _take_along_axis(x: Var, indices: npt.NDArray[np.integer], axis: int) -> Var:
    places = np.indices(indices.shape)
    return x[tuple(indices if i == axis else places[i] for i in range(x.ndim))]


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.sum: Var.sum,
    np.mean: Var.mean,
    np.max: Var.max,
    np.where: _where,
    np.clip: _clip,
    np.einsum: _einsum,
    np.concatenate: _concatenate,
    np.split: _split,
    np.repeat: _repeat,
    np.take_along_axis: _take_along_axis,
    np.stack: lambda xs: _concatenate([x.reshape(1, *x.shape) for x in xs]),
}
