"""The gates of Gated DeltaNet (Yang et al., 2024): what a token forgets, and how much it writes."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


def gated_delta_gates(
    g: Graph, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes decay = -exp(a_log) · softplus(a + dt_bias) and beta = sigmoid(b).

    Args:
        g: The graph.
        a: (rows, value heads) of any type.
        b: Like a.
        a_log: (value heads) float32, frozen.
        dt_bias: Like a_log.

    Returns:
        decay, the logarithm of what is kept of the state, and beta; both (rows, value heads)
        float32.

    Raises:
        GraphError: If the shapes do not fit.
    """
    if a.shape != b.shape or {a_log.columns, dt_bias.columns} != {a.columns}:
        raise GraphError(f"gated_delta_gates: {a}, {b}, {a_log} and {dt_bias} do not fit")
    decay, beta = (g.float32(name, *a.shape) for name in ("decay", "beta"))
    inputs = {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    units = a.rows * a.units(8)
    params = {"units": units, "stride": a.units(8), "heads": a.columns}
    outputs = {"decay": decay, "beta": beta}
    g.launch("gated_delta/gates.wgsl", units, {**inputs, **outputs}, params)

    def vjp(gradients: list[Tensor | None]) -> None:
        da, db = g.gradient_for(a), g.gradient_for(b)
        given = {"ddecay": gradients[0], "dbeta": gradients[1], "da": da, "db": db}
        g.launch("gated_delta/gates_backward.wgsl", units, {**inputs, **given}, params)
        g.add_gradient(a, da)
        g.add_gradient(b, db)

    g.record_jointly([decay, beta], [a, b], vjp)
    return decay, beta
