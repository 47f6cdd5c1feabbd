"""How a mixture's router chooses experts for a token, and weighs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.family import NormSize, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.routing import Routing, route
from qlora_wgpu.ops.scored_routing import MOST_GROUPS, Scoring, route_by_scores

__all__ = ["Router", "Scoring", "read_groups", "softmax_router"]


@dataclass(frozen=True)
class Router:
    """The experts with the largest scores, weighted by these.

    Attributes:
        scoring: What makes scores of logits, and weights of scores.
        correction: The name within a layer of what is added to the scores for the choice alone.
        correction_rows: Whether files have that as a matrix of one row.
    """

    scoring: Scoring
    correction: str | None = None
    correction_rows: bool = False

    def weights(self, at: str, num_experts: int) -> Weights:
        """The corrections of the layer whose names begin so."""
        size: NormSize = (1, num_experts) if self.correction_rows else num_experts
        norms: Mapping[str, NormSize] = {f"{at}{self.correction}": size}
        return Weights(norms={} if self.correction is None else norms)

    @property
    def by_logits(self) -> bool:
        """Whether the chosen experts are those with the largest logits."""
        return self.correction is None and self.scoring.top_groups >= self.scoring.groups

    def route(self, ops: LayerOps, logits: Tensor, at: str, top_k: int, scale: float) -> Routing:
        """Each row's experts and their weights, times scale."""
        scoring = replace(self.scoring, scale=scale * self.scoring.scale)
        bias = None if self.correction is None else ops.small(f"{at}{self.correction}")
        if scoring.sigmoid or not self.by_logits:
            return route_by_scores(ops.g, logits, bias, top_k, scoring, ops.expert_tile)
        # The softmax over the chosen is what is left of that over all, divided by its sum.
        normalized, factor = scoring.normalized, scoring.scale
        return route(
            ops.g, logits, top_k, normalized=normalized, scale=factor, tile=ops.expert_tile
        )


def softmax_router(*, normalized: bool) -> Router:
    """The softmax over all experts, or (normalized) over those chosen."""
    return Router(Scoring(sigmoid=False, normalized=normalized))


def read_groups(read: ConfigReader, experts: int, top_k: int, scoring: Scoring) -> Scoring:
    """The scoring with ``n_group`` and ``topk_group``, and ``routed_scaling_factor``.

    Args:
        read: The config.json.
        experts: How many there are.
        top_k: How many a token meets.
        scoring: The rest.

    Raises:
        UnsupportedModelError: If groups do not divide the experts, or hold too few.
    """
    groups, top_groups = read.integer("n_group", 1), read.integer("topk_group", 1)
    factor = read.number("routed_scaling_factor", scoring.scale)
    whole = replace(scoring, groups=groups, top_groups=top_groups, scale=factor)
    if not whole.fits(experts, top_k):
        raise UnsupportedModelError(
            f"config.json: n_group {groups} and topk_group {top_groups} do not fit "
            f"{experts} experts of which {top_k} are chosen (at most {MOST_GROUPS} groups)"
        )
    return whole
