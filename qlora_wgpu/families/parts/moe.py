"""A mixture of experts instead of a layer's MLP or next to it: router, experts, shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import (
    BalanceLoss,
    ExpertSpec,
    LinearSpec,
    NormSize,
    RouterSpec,
    Stacking,
    Weights,
)
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.mlp import FusedGatedMLP, GatedMLP, PlainMLP
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.experts import with_factors
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.pointwise import ClampedGLU
from qlora_wgpu.ops.routing import (
    MOST_GROUPS,
    Routing,
    Scoring,
    combine,
    permute,
    route,
    route_by_scores,
)

__all__ = ["Router", "Scoring", "read_groups", "softmax_router"]


@dataclass(frozen=True)
class Router:
    """Selects the experts with the largest scores, and weights them by these."""

    scoring: Scoring  # how scores follow from logits, and weights from scores
    # The name within a layer of the correction bias, which is added to scores for the choice only.
    correction: str | None = None
    correction_rows: bool = False  # whether files store it as a matrix of one row

    def weights(self, at: str, num_experts: int) -> Weights:
        size: NormSize = (1, num_experts) if self.correction_rows else num_experts
        norms: Mapping[str, NormSize] = {f"{at}{self.correction}": size}
        return Weights(norms={} if self.correction is None else norms)

    @property
    def by_logits(self) -> bool:
        return self.correction is None and self.scoring.top_groups >= self.scoring.groups

    def route(self, ops: LayerOps, logits: Tensor, at: str, top_k: int, scale: float) -> Routing:
        scoring = replace(self.scoring, scale=scale * self.scoring.scale)
        bias = None if self.correction is None else ops.small(f"{at}{self.correction}")
        if scoring.sigmoid or not self.by_logits:
            return route_by_scores(ops.g, logits, bias, top_k, scoring, ops.expert_tile)
        # The softmax over the chosen experts is that over all, divided by its sum.
        normalized, factor = scoring.normalized, scoring.scale
        return route(
            ops.g, logits, top_k, normalized=normalized, scale=factor, tile=ops.expert_tile
        )


def softmax_router(*, normalized: bool) -> Router:
    return Router(Scoring(sigmoid=False, normalized=normalized))


def read_groups(read: ConfigReader, experts: int, top_k: int, scoring: Scoring) -> Scoring:
    """The scoring with ``n_group`` and ``topk_group``, and ``routed_scaling_factor``."""
    groups, top_groups = read.integer("n_group", 1), read.integer("topk_group", 1)
    factor = read.number("routed_scaling_factor", scoring.scale)
    whole = replace(scoring, groups=groups, top_groups=top_groups, scale=factor)
    if not whole.fits(experts, top_k):
        raise UnsupportedModelError(
            f"config.json: n_group {groups} and topk_group {top_groups} do not fit "
            f"{top_k} of {experts} experts (at most {MOST_GROUPS} groups)"
        )
    return whole


@dataclass(frozen=True)
class SharedExpert:
    """sigmoid(gate(x)) · mlp(x), or mlp(x) alone."""

    mlp: GatedMLP | FusedGatedMLP | PlainMLP  # the expert, by its name within a layer
    # The name within a layer of the gate, a linear layer with one output, if there is one.
    gate: str | None = None

    def weights(self, at: str) -> Weights:
        weights = self.mlp.weights(at)
        if self.gate is not None:
            hidden_size = self.mlp.dimensions.hidden_size
            weights += Weights((LinearSpec(f"{at}{self.gate}", 1, hidden_size),))
        return weights

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        if self.gate is None:
            return self.mlp.trace(ops, x, at, residual, scale)
        if scale != 1.0:
            raise GraphError(f"{at}{self.gate}: a gated expert requires a residual scale of 1")
        gate = ops.linear(x, f"{at}{self.gate}", float32=True)
        return ops.row_gate(self.mlp.trace(ops, x, at, None, 1.0), gate, residual)


def _experts(
    at: str, leaves: tuple[str, ...], count: int, inner: int, hidden_size: int, *more: Any
) -> tuple[ExpertSpec, ...]:
    *wide, down = leaves
    specs = [ExpertSpec(at, leaf, count, inner, hidden_size, *more) for leaf in wide]
    return *specs, ExpertSpec(at, down, count, hidden_size, inner, *more)


def _through(
    ops: LayerOps, x: Tensor, names: Sequence[str], routing: Routing,
    activation: str | ClampedGLU, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The outputs of each row's experts, by the names of gate, up and down, or up and down."""
    x, (*wide, down) = permute(ops.g, x, routing), names
    gate, *ups = (ops.expert_linear(x, name, routing) for name in wide)
    if isinstance(activation, ClampedGLU):
        y = ops.clamped_glu(gate, ups[0], activation)
    elif ups:
        y = ops.glu(gate, ups[0], activation)
    else:
        y = ops.activation(gate, activation)
    return combine(ops.g, ops.expert_linear(y, down, routing), routing, residual)


@dataclass(frozen=True)
class LatentExperts:
    """Layers before and after all experts, which are smaller than the residual stream."""

    size: int  # elements of the experts' rows
    bias: bool  # whether both layers have biases
    before: str = "fc1_latent_proj"  # the name of the layer before
    after: str = "fc2_latent_proj"  # the name of the layer after

    def weights(self, at: str, hidden_size: int) -> Weights:
        before = LinearSpec(at + self.before, self.size, hidden_size, self.bias)
        return Weights((before, LinearSpec(at + self.after, hidden_size, self.size, self.bias)))


@dataclass(frozen=True)
class SparseMoeBlock:
    """The mixture of a layer."""

    hidden_size: int  # elements of a row of the residual stream
    intermediate_size: int  # rows of an expert's gate and up
    # The activation of the experts' gates, or of up without gates, or gpt-oss's gated unit.
    activation: str | ClampedGLU
    num_experts: int  # number of experts
    num_experts_per_tok: int  # experts per token
    # Whether a token's expert weights sum to one, if there is no ``choice``.
    norm_topk_prob: bool = True
    name: str = "mlp"  # the module's name within a layer
    # The names of gate, up and down within an expert, or of up and down.
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"  # the router's name within the module
    router_is_module: bool = False  # see ``RouterSpec``
    router_held: str | None = None  # its name in transformers, if different
    bias: bool = False  # whether the router and all experts' layers have biases
    in_turns: bool = False  # see ``Stacking``
    held: str | None = None  # the module's name in transformers, if different
    fused: bool = True  # see ``ExpertSpec``
    shared: SharedExpert | None = None  # the shared expert, if there is one
    # How experts are chosen and weighted, if not by the largest logits and their softmax.
    choice: Router | None = None
    latent: LatentExperts | None = None  # if experts are smaller than the residual stream

    def weights(self, at: str) -> Weights:
        experts, count = f"{at}{self.name}.experts", self.num_experts
        hidden_size, inner = self.hidden_size, self.intermediate_size
        size = hidden_size if self.latent is None else self.latent.size
        router, bias = f"{at}{self.name}.{self.router}", self.bias
        shared = Weights() if self.shared is None else self.shared.weights(at)
        held = self.name if self.held is None else self.held
        router_held = self.router if self.router_held is None else self.router_held
        stacking = Stacking(
            self.leaves,
            f"{self.name}.experts",
            f"{held}.experts",
            self.in_turns,
            (f"{self.name}.{self.router}", f"{held}.{router_held}"),
        )
        more = bias, stacking, self.fused
        corrections = self._router.weights(at, count)
        own = Weights(
            norms={f"{router}.bias": count} if bias else {},
            experts=_experts(experts, self.leaves, count, inner, size, *more),
            routers=(RouterSpec(router, count, hidden_size, is_module=self.router_is_module),),
        )
        if self.latent is not None:
            own += self.latent.weights(f"{at}{self.name}.", hidden_size)
        return shared + corrections + own

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        if self.shared is not None:
            residual = self.shared.trace(ops, x, at, residual, scale)
        logits = ops.router(x, f"{at}{self.name}.{self.router}")
        routing = self._router.route(ops, logits, at, self.num_experts_per_tok, scale)
        ops.balance(logits, routing, by_logits=self._router.by_logits)
        at = f"{at}{self.name}."
        names = [f"{at}experts.{leaf}" for leaf in self.leaves]
        if self.latent is None:
            return _through(ops, x, names, routing, self.activation, residual)
        x = ops.linear(x, f"{at}{self.latent.before}")
        y = ops.operand(_through(ops, x, names, routing, self.activation, None))
        return ops.linear_out(y, f"{at}{self.latent.after}", residual, 1.0)

    @property
    def _router(self) -> Router:
        return self.choice or softmax_router(normalized=self.norm_topk_prob)


def read_clamped_glu(read: ConfigReader) -> ClampedGLU:
    return ClampedGLU(read.number("swiglu_limit", 7.0), read.number("swiglu_alpha", 1.702))


def read_expert_counts(
    read: ConfigReader, num_experts: int, num_experts_per_tok: int
) -> tuple[int, int]:
    """Experts of a layer, by the old or the new key, and experts per token."""
    new = read.config.get("num_experts") is not None
    key = "num_experts" if new else "num_local_experts"
    count = read.integer(key, num_experts)
    top = read.integer("num_experts_per_tok", num_experts_per_tok)
    check_expert_counts(read, (key, count), ("num_experts_per_tok", top))
    return count, top


def check_expert_counts(read: ConfigReader, experts: tuple[str, int], top: tuple[str, int]) -> None:
    if top[1] > experts[1]:
        raise UnsupportedModelError(
            f"config.json: {top[0]} {top[1]} exceeds {experts[0]} {experts[1]}"
        )


def read_balance_loss(read: ConfigReader, coefficient: float = 0.001) -> BalanceLoss:
    """The load-balancing loss by ``output_router_logits`` and ``router_aux_loss_coef``."""
    return BalanceLoss(
        read.number("router_aux_loss_coef", coefficient), read.flag("output_router_logits")
    )


def refuse_balance_loss(read: ConfigReader) -> None:
    if read.flag("output_router_logits"):
        raise UnsupportedModelError(
            "config.json: output_router_logits = true is not supported: transformers has no "
            "load-balancing loss for this family; set it to false"
        )


def sparse_layers(read: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has experts, by ``decoder_sparse_step`` and ``mlp_only_layers``."""
    dense = read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise UnsupportedModelError("config.json: mlp_only_layers must be a list of integers")
    step = read.integer("decoder_sparse_step", 1)
    dense = set(dense)
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


@dataclass(frozen=True)
class MixtureBeside:
    """norm(MLP) + norm(experts), where experts and router read the residual stream by own norms."""

    hidden_size: int  # elements of a row of the residual stream
    intermediate_size: int  # rows of an expert's gate and up
    activation: str  # the activation of the experts' gates
    num_experts: int  # number of experts
    top_k: int  # experts per token
    eps: float  # added under the norms' roots
    # The names of gate, up and down within an expert.
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    after_mlp: str = "post_feedforward_layernorm_1"  # the norm of the MLP's output
    before: str = "pre_feedforward_layernorm_2"  # the norm of the experts' input
    after: str = "post_feedforward_layernorm_2"  # the norm of the experts' output

    def weights(self, at: str) -> Weights:
        count, hidden_size, inner = self.num_experts, self.hidden_size, self.intermediate_size
        more = False, Stacking(self.leaves), False  # no bias, and unknown to PEFT
        weights = Weights(
            norms={f"{at}router.scale": hidden_size, f"{at}router.per_expert_scale": count},
            experts=_experts(f"{at}experts", self.leaves, count, inner, hidden_size, *more),
            routers=(RouterSpec(f"{at}router.proj", count, hidden_size, is_module=True),),
        )
        for name in (self.after_mlp, self.before, self.after):
            weights += self._norm.weights(at + name, hidden_size)
        return weights

    def trace(self, ops: LayerOps, h: Tensor, made: Tensor, at: str) -> Tensor:
        """The experts' output for the residual stream h plus ``made``, the MLP's; float32."""
        dense = self._norm.trace(ops, made, at + self.after_mlp)
        x = rms_norm(ops.g, h, ops.small(f"{at}router.scale"), self.eps)
        logits = ops.router(x, f"{at}router.proj", self.hidden_size**-0.5)
        routing = route(ops.g, logits, self.top_k, normalized=True, tile=ops.expert_tile)
        routing = with_factors(ops.g, routing, ops.small(f"{at}router.per_expert_scale"))
        x = self._norm.trace(ops, h, at + self.before)
        names = [f"{at}experts.{leaf}" for leaf in self.leaves]
        sparse = _through(ops, x, names, routing, self.activation, None)
        return self._norm.trace(ops, sparse, at + self.after, residual=dense)

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.eps)
