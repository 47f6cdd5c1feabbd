"""Routing by scores: a sigmoid's or a softmax's, with corrections and groups for the choice alone.

DeepSeek-V3 (2024), section 2.1.2: the corrections balance the experts' load without a loss; they
change which experts are chosen, and neither their weights nor any gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.experts import EXPERT_TILE
from qlora_wgpu.ops.routing import Routing, assigned

MOST_GROUPS = 32  # bits that tell which are chosen


@dataclass(frozen=True)
class Scoring:
    """How experts are chosen by their scores, and weighted.

    Attributes:
        sigmoid: Whether scores are the logits' sigmoids, instead of their softmax over all experts.
        normalized: Whether the weights are the chosen ones' scores divided by their sum.
        least: What is added to that sum.
        at_least: Whether the sum is ``least`` at least instead.
        scale: Factor of all weights.
        groups: Groups of neighbours that experts are in.
        top_groups: From how many of them experts are chosen.
        pairs: Whether a group's rank is the sum of its two best, instead of its best.
    """

    sigmoid: bool
    normalized: bool
    least: float = 0.0
    at_least: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    pairs: bool = False

    def fits(self, experts: int, top_k: int) -> bool:
        """Whether so many can be chosen of so many."""
        if not 0 < self.top_groups <= self.groups <= MOST_GROUPS or experts % self.groups:
            return False
        size = experts // self.groups
        return 0 < top_k <= self.top_groups * size and size > (self.pairs and self.groups > 1)


def route_by_scores(
    g: Graph,
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: Scoring,
    tile: int = EXPERT_TILE,
) -> Routing:
    """Chooses experts by their scores and gives the assignments slots.

    Args:
        g: The graph.
        logits: (rows, experts) float32, of the router.
        bias: (experts) float32, added to the scores that choose, if given.
        top_k: Experts that each row meets.
        scoring: What makes scores of logits, and weights of scores.
        tile: Rows of a tile.

    Raises:
        GraphError: If there are not so many experts or groups.
    """
    experts = logits.columns
    fits = scoring.fits(experts, top_k) and (bias is None or bias.columns == experts)
    if logits.dtype != "float32" or not fits:
        raise GraphError(
            f"route_by_scores: {top_k} experts cannot be chosen by {logits} and {bias}, {scoring}"
        )
    ids = g.integers("expert ids", logits.rows * top_k)
    weights = g.float32("expert weights", logits.rows, top_k)
    params = {
        "rows": logits.rows,
        "experts": experts,
        "logit_stride": logits.stride,
        "top_k": top_k,
        "weight_stride": weights.stride,
        "least": scoring.least,
        "scale": scoring.scale,
    }
    groups = {"groups": scoring.groups, "top_groups": scoring.top_groups}
    constants = {
        "SIGMOID": scoring.sigmoid,
        "NORMALIZED": scoring.normalized,
        "AT_LEAST": scoring.at_least,
    }
    kinds = {"GROUPED": scoring.top_groups < scoring.groups, "PAIRS": scoring.pairs}
    g.launch(
        "experts/route_scored.wgsl",
        logits.rows,
        {"logits": logits, "bias": bias, "ids": ids, "weights": weights},
        {**params, **groups},
        {**constants, **kinds},
        turns=(top_k + scoring.top_groups + 2) * (experts + scoring.groups + 2),
    )

    def vjp(dweights: Tensor) -> None:
        dlogits = g.float32(f"d {logits.name}", logits.rows, experts)
        g.launch(
            "experts/route_scored_backward.wgsl",
            logits.rows,
            {"logits": logits, "ids": ids, "dweights": dweights, "dlogits": dlogits},
            params,
            constants,
        )
        g.add_gradient(logits, dlogits)

    g.record(weights, [logits], vjp)
    return assigned(g, ids, weights, top_k, experts, tile)
