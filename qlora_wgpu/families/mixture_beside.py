"""A mixture of experts beside a layer's MLP, both of one residual stream (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import ExpertSpec, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.families.norm import RMSNorm
from qlora_wgpu.families.stacking import Stacking
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.expert_factors import with_factors
from qlora_wgpu.ops.routing import combine, permute, route


@dataclass(frozen=True)
class MixtureBeside:
    """norm(MLP) + norm(experts), where experts and router read the stream by norms of their own.

    Attributes:
        hidden_size: Elements of a row of the residual stream.
        intermediate_size: Rows of an expert's gate and up.
        activation: The activation of the experts' gates.
        num_experts: Number of experts.
        top_k: Number of experts that each token meets.
        eps: Added under the norms' roots.
        leaves: An expert's names of gate, up and down.
        after_mlp: The norm of what the MLP makes.
        before: The norm of what experts read.
        after: The norm of what they make.
    """

    hidden_size: int
    intermediate_size: int
    activation: str
    num_experts: int
    top_k: int
    eps: float
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    after_mlp: str = "post_feedforward_layernorm_1"
    before: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"

    def weights(self, at: str) -> Weights:
        """The router, the experts and the norms of the layer whose names begin so."""
        count, hidden_size, inner = self.num_experts, self.hidden_size, self.intermediate_size
        gate, up, down = self.leaves
        more = False, Stacking(self.leaves), False  # no bias, and unknown to PEFT
        weights = Weights(
            norms={f"{at}router.scale": hidden_size, f"{at}router.per_expert_scale": count},
            experts=(
                ExpertSpec(f"{at}experts", gate, count, inner, hidden_size, *more),
                ExpertSpec(f"{at}experts", up, count, inner, hidden_size, *more),
                ExpertSpec(f"{at}experts", down, count, hidden_size, inner, *more),
            ),
            routers={f"{at}router.proj.weight": (count, hidden_size)},
        )
        for name in (self.after_mlp, self.before, self.after):
            weights += self._norm.weights(at + name, hidden_size)
        return weights

    def trace(self, ops: LayerOps, h: Tensor, made: Tensor, at: str) -> Tensor:
        """Both together, float32.

        Args:
            ops: The ops.
            h: The residual stream that the MLP has read, (rows, hidden_size) float32.
            made: What the MLP made of it, likewise.
            at: How the layer's names begin.
        """
        dense = self._norm.trace(ops, made, at + self.after_mlp)
        x = ops.rms_norm_by(h, f"{at}router.scale", self.eps)
        logits = ops.router(x, f"{at}router.proj", self.hidden_size**-0.5)
        routing = route(ops.g, logits, self.top_k, normalized=True, tile=ops.expert_tile)
        routing = with_factors(ops.g, routing, ops.vector(f"{at}router.per_expert_scale"))
        x = permute(ops.g, self._norm.trace(ops, h, at + self.before), routing)
        gate, up, down = (f"{at}experts.{leaf}" for leaf in self.leaves)
        both = ops.expert_linear(x, gate, routing), ops.expert_linear(x, up, routing)
        y = ops.expert_linear(ops.glu(*both, self.activation), down, routing)
        sparse = combine(ops.g, y, routing, None)
        return self._norm.trace(ops, sparse, at + self.after, residual=dense)

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.eps)
