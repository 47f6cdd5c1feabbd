"""AltUp (Baykal et al., 2023): several streams per token, of which a layer computes one.

The active stream is a matrix (rows, columns); the others are one below the other in a second matrix
((streams - 1) · rows, columns), in order. Both are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import row_constants, row_workgroups
from qlora_wgpu.ops.tensor import fill_zero

MOST_STREAMS = 8
"""A layer's kernels hold their square in registers."""


def altup_predict(
    g: Graph, x: Tensor, others: Tensor, coefs: Tensor, active: int
) -> tuple[Tensor, Tensor]:
    """The prediction x_j + Σ_i coefs[j · streams + i] · x_i of every stream j.

    Args:
        g: The graph.
        x: The active stream.
        others: The other streams.
        coefs: Float32 (rows, streams²).
        active: The number of the active stream.

    Returns:
        The same two for the prediction.
    """
    count = others.rows // x.rows + 1
    fits = others.shape == ((count - 1) * x.rows, x.columns) and 0 <= active < count
    if not fits or coefs.shape != (x.rows, count**2) or not 2 <= count <= MOST_STREAMS:
        raise GraphError(f"altup_predict: {x}, {others} and {coefs} do not fit")
    y, y_others = (g.float32(f"predicted {each.name}", *each.shape) for each in (x, others))
    given, constants = {"x": x, "others": others, "coefs": coefs}, _streams(count, active)
    tensors = {**given, "y": y, "y_others": y_others}
    g.launch("altup_predict/forward.wgsl", x.rows * x.units(8), tensors, None, constants)

    def vjp(gradients: list[Tensor | None]) -> None:
        dy, dy_others = gradients
        made = [g.float32(f"d {each.name}", *each.shape) for each in (x, others, coefs)]
        bound = {**given, "dy": dy, "dy_others": dy_others}
        bound |= dict(zip(("dx", "dothers", "dcoefs"), made, strict=True))
        g.launch(
            "altup_predict/backward.wgsl", row_workgroups(g, x.rows), bound, None,
            {**constants, **row_constants(g)},
        )  # fmt: skip
        for each, gradient in zip((x, others, coefs), made, strict=True):
            g.add_gradient(each, gradient)

    g.record_jointly([y, y_others], [x, others, coefs], vjp)
    return y, y_others


def _streams(count: int, active: int) -> dict[str, bool | int | float]:
    return {"STREAMS": count, "ACTIVE": active}


def altup_correct(
    g: Graph,
    base: Tensor,
    predicted: Tensor,
    made: Tensor,
    gains: Tensor,
    active: int,
    added: Tensor | None = None,
) -> Tensor:
    """The correction base_j + (1 + gains[j]) · (made - predicted) of the active or other streams.

    Args:
        g: The graph.
        base: The predictions to correct: the active stream's, or all others'.
        predicted: The prediction of the active stream.
        made: What the layer computed for it.
        gains: Float32 (rows, streams).
        active: The number of the active stream.
        added: What is added to the corrections of all streams but the first, if anything.

    Returns:
        The corrections, float32 of the shape of ``base``.
    """
    rows, streams = made.rows, gains.columns
    is_active = base is predicted
    count = 1 if is_active else streams - 1
    alike = base.shape == (count * rows, made.columns) and predicted.shape == made.shape
    alike = alike and (added is None or added.shape == made.shape)
    if not alike or gains.rows != rows or not 0 <= active < streams <= MOST_STREAMS:
        raise GraphError(f"altup_correct: {base}, {predicted}, {made} and {gains} do not fit")
    constants = {
        "COUNT": count,
        "FIRST": active if is_active else 0,
        "SKIPPED": streams if is_active else active,
    }
    y = g.float32(f"corrected {base.name}", *base.shape)
    given = {"predicted": predicted, "made": made, "gains": gains}
    tensors = {"base": base, **given, "added": added, "y": y}
    units = base.rows * base.units(8)
    g.launch("altup_correct/forward.wgsl", units, tensors, None, constants)

    def vjp(dy: Tensor) -> None:
        of = [predicted, made, gains, *([] if added is None else [added])]
        gradients = [g.float32(f"d {each.name}", *each.shape) for each in of]
        bound: dict[str, Tensor | None] = {**given, "dy": dy}
        names = ("dpredicted", "dmade", "dgains", "dadded")
        bound |= dict(zip(names, gradients, strict=False))
        g.launch(
            "altup_correct/backward.wgsl", row_workgroups(g, rows), bound, None,
            {**constants, **row_constants(g)},
        )  # fmt: skip
        g.add_gradient(base, dy)
        for each, gradient in zip(of, gradients, strict=True):
            g.add_gradient(each, gradient)

    inputs = [base, predicted, made, gains, *([] if added is None else [added])]
    g.record(y, inputs, vjp)
    return y


def rms_match(
    g: Graph, x: Tensor, like: Tensor, floor: float, residual: Tensor | None = None
) -> Tensor:
    """y = x · √(mean(like²) / max(mean(x²), floor)) (+ residual) over each row, float32."""
    if x.shape != like.shape or (residual is not None and residual.shape != x.shape):
        raise GraphError(f"rms_match: {x}, {like} and {residual} do not fit")
    y = g.float32(f"matched {x.name}", *x.shape)
    workgroups, constants, params = row_workgroups(g, x.rows), row_constants(g), {"floor": floor}
    tensors = {"x": x, "like": like, "residual": residual, "y": y}
    g.launch("rms_match/forward.wgsl", workgroups, tensors, params, constants)

    def vjp(dy: Tensor) -> None:
        dx, dlike = g.new_gradient(x), g.new_gradient(like)
        bound = {"x": x, "like": like, "dy": dy, "dx": dx, "dlike": dlike}
        g.launch("rms_match/backward.wgsl", workgroups, bound, params, constants)
        g.add_gradient(x, dx)
        g.add_gradient(like, dlike)
        if residual is not None:
            g.add_gradient(residual, dy)

    g.record(y, [x, like] if residual is None else [x, like, residual], vjp)
    return y


def stacked(g: Graph, xs: Sequence[Tensor]) -> Tensor:
    """Matrices of one shape, one below the other, float32."""
    if any(x.shape != xs[0].shape for x in xs):
        raise GraphError(f"stacked: {', '.join(map(str, xs))} differ")
    y = g.float32("streams", len(xs) * xs[0].rows, xs[0].columns)
    for i, x in enumerate(xs):
        _copy_rows(g, x, y, x.rows, to=i * x.rows)

    def vjp(dy: Tensor) -> None:
        for i, x in enumerate(xs):
            dx = g.new_gradient(x)
            _copy_rows(g, dy, dx, x.rows, first=i * x.rows)
            g.add_gradient(x, dx)

    g.record(y, xs, vjp)
    return y


def unstacked(g: Graph, x: Tensor, count: int) -> tuple[Tensor, ...]:
    """The inverse of ``stacked``."""
    if x.rows % count:
        raise GraphError(f"unstacked: {x} is not {count} matrices")
    rows = x.rows // count
    ys = tuple(g.float32(f"stream of {x.name}", rows, x.columns) for _ in range(count))
    for i, y in enumerate(ys):
        _copy_rows(g, x, y, rows, first=i * rows)

    def vjp(gradients: list[Tensor | None]) -> None:
        dx = g.float32(f"d {x.name}", x.rows, x.columns)
        if None in gradients:
            fill_zero(g, dx)
        for i, dy in enumerate(gradients):
            if dy is not None:
                _copy_rows(g, dy, dx, rows, to=i * rows)
        g.add_gradient(x, dx)

    g.record_jointly(ys, [x], vjp)
    return ys


def _copy_rows(g: Graph, x: Tensor, y: Tensor, rows: int, first: int = 0, to: int = 0) -> None:
    """Copies rows of x from ``first`` on to those of y from ``to`` on."""
    units = rows * x.units(8)
    params = {"units": units, "first_x": first * x.units(8), "first_y": to * y.units(8)}
    g.launch("tensor/copy_rows.wgsl", units, {"x": x, "y": y}, params)
