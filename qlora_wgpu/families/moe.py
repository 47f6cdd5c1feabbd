"""A mixture of experts in place of a layer's MLP: a router, and a gated MLP per expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import ConfigReader, ExpertSpec
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.routing import combine, permute, route


@dataclass(frozen=True)
class Experts:
    """The mixture of a model.

    Attributes:
        layers: Which layers have it.
        count: Experts of a layer.
        top: That each token meets.
        intermediate_size: Of an expert.
        normalized: Whether the weights of those that a token meets sum up to one.
        at: What the module is called within a layer.
        leaves: What an expert calls its gate, up and down.
    """

    layers: tuple[bool, ...]
    count: int
    top: int
    intermediate_size: int
    normalized: bool
    at: str = "mlp"
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def router(self, at: str, hidden: int) -> dict[str, tuple[int, int]]:
        """The router's matrix of the layer whose names begin so."""
        return {f"{at}{self.at}.gate.weight": (self.count, hidden)}

    def specs(self, at: str, hidden: int) -> list[ExpertSpec]:
        """The experts' layers of the layer whose names begin so."""
        gate, up, down = self.leaves
        experts, inner = f"{at}{self.at}.experts", self.intermediate_size
        return [
            ExpertSpec(experts, gate, self.count, inner, hidden),
            ExpertSpec(experts, up, self.count, inner, hidden),
            ExpertSpec(experts, down, self.count, hidden, inner),
        ]

    def forward(self, trace: LayerOps, x: Tensor, h: Tensor, at: str, activation: str) -> Tensor:
        """Adds to h what the experts make of x."""
        gate, up, down = (f"{at}{self.at}.experts.{leaf}" for leaf in self.leaves)
        logits = trace.router(x, f"{at}{self.at}.gate")
        routing = route(trace.g, logits, self.top, normalized=self.normalized)
        x = permute(trace.g, x, routing)
        y = glu(
            trace.g,
            trace.expert_linear(x, gate, routing),
            trace.expert_linear(x, up, routing),
            activation,
        )
        y = trace.expert_linear(y, down, routing)
        return combine(trace.g, y, routing, h)


def read_counts(
    config: Mapping[str, Any], read: ConfigReader, default: int, default_top: int
) -> tuple[int, int]:
    """How many experts a layer has, by its old or its new key, and how many a token meets.

    Raises:
        UnsupportedModelError: If a token would meet more than there are, or the router's balance
            is to be trained.
    """
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count, top = read.integer(key, default), read.integer("num_experts_per_tok", default_top)
    if top > count:
        raise UnsupportedModelError(f"config.json: num_experts_per_tok {top} exceeds {key} {count}")
    if read.flag("output_router_logits"):
        raise UnsupportedModelError(
            "config.json: output_router_logits = true adds a loss that balances the experts, which "
            "is not computed here, since the router stays frozen: set it to false"
        )
    return count, top
