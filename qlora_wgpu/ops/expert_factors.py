"""A factor of each expert of a mixture, which the weights of its assignments are multiplied by."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.routing import Routing


def with_factors(g: Graph, routing: Routing, factors: Tensor) -> Routing:
    """Multiplies each assignment's weight by its expert's factor.

    Args:
        g: The graph.
        routing: Where rows go, and by which weights.
        factors: (experts) float32, frozen.

    Returns:
        The same routing with other weights.

    Raises:
        GraphError: If there are not as many factors as experts.
    """
    weights = routing.weights
    count = routing.tiles.count
    if factors.shape != (1, count):
        raise GraphError(f"with_factors: {factors} is not a number for each of {count} experts")
    params = {"rows": weights.rows, "top_k": routing.top_k, "stride": weights.stride}
    shared = {
        "slots": routing.slots,
        "tile_experts": routing.tiles.experts,
        "factors": factors,
    }

    def multiplied(w: Tensor, name: str) -> Tensor:
        y = g.float32(name, weights.rows, weights.columns)
        g.launch(
            "experts/factors.wgsl",
            weights.rows * weights.stride,
            {"w": w, **shared, "y": y},
            params,
            {"EXPERT_TILE": routing.tiles.tile},
        )
        return y

    y = multiplied(weights, "factored expert weights")
    g.record(y, [weights], lambda dy: g.add_gradient(weights, multiplied(dy, "d expert weights")))
    return replace(routing, weights=y)
