"""A mixture of experts in place of a layer's MLP: a router, and a gated MLP per expert."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.family import BalanceLoss, ExpertSpec, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.families.router import Router, softmax_router
from qlora_wgpu.families.shared_expert import SharedExpert
from qlora_wgpu.families.stacking import Stacking
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.pointwise import ClampedGLU
from qlora_wgpu.ops.routing import combine, permute


@dataclass(frozen=True)
class Experts:
    """The mixture of a layer.

    Attributes:
        hidden_size: Elements of a row of the residual stream.
        intermediate_size: Rows of an expert's gate and up.
        activation: The activation of the experts' gates, or gpt-oss's unit in place of gate · up.
        num_experts: Number of experts.
        num_experts_per_tok: Number of experts that each token meets.
        norm_topk_prob: Whether the weights of those that a token meets sum up to one, where no
            ``choice`` says it.
        name: The module's name within a layer.
        leaves: An expert's names of gate, up and down.
        router: The router's name within the module.
        bias: Whether the router and all experts' layers have biases.
        in_turns: See ``Stacking``.
        held: What transformers calls the module, if otherwise.
        fused: See ``ExpertSpec``.
        shared: What every token meets beside its experts, if anything.
        choice: How experts are chosen and weighted, if not by the largest logits and their softmax.
    """

    hidden_size: int
    intermediate_size: int
    activation: str | ClampedGLU
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    name: str = "mlp"
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    bias: bool = False
    in_turns: bool = False
    held: str | None = None
    fused: bool = True
    shared: SharedExpert | None = None
    choice: Router | None = None

    def weights(self, at: str) -> Weights:
        """The router, the experts and the shared one of the layer whose names begin so."""
        experts, count = f"{at}{self.name}.experts", self.num_experts
        hidden_size, inner = self.hidden_size, self.intermediate_size
        (gate, up, down), router, bias = self.leaves, f"{at}{self.name}.{self.router}", self.bias
        shared = Weights() if self.shared is None else self.shared.weights(at)
        held = self.name if self.held is None else self.held
        stacking = Stacking(self.leaves, f"{self.name}.experts", f"{held}.experts", self.in_turns)
        more = bias, stacking, self.fused
        corrections = self._router.weights(at, count)
        own = Weights(
            norms={f"{router}.bias": count} if bias else {},
            experts=(
                ExpertSpec(experts, gate, count, inner, hidden_size, *more),
                ExpertSpec(experts, up, count, inner, hidden_size, *more),
                ExpertSpec(experts, down, count, hidden_size, inner, *more),
            ),
            routers={f"{router}.weight": (count, hidden_size)},
        )
        return shared + corrections + own

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Adds scale times what experts make of x to the residual; or that alone, in float32."""
        gate, up, down = (f"{at}{self.name}.experts.{leaf}" for leaf in self.leaves)
        if self.shared is not None:
            residual = self.shared.trace(ops, x, at, residual, scale)
        logits = ops.router(x, f"{at}{self.name}.{self.router}")
        routing = self._router.route(ops, logits, at, self.num_experts_per_tok, scale)
        ops.balance(logits, routing, by_logits=self._router.by_logits)
        x = permute(ops.g, x, routing)
        both = ops.expert_linear(x, gate, routing), ops.expert_linear(x, up, routing)
        if isinstance(self.activation, ClampedGLU):
            y = ops.clamped_glu(*both, self.activation)
        else:
            y = ops.glu(*both, self.activation)
        return combine(ops.g, ops.expert_linear(y, down, routing), routing, residual)

    @property
    def _router(self) -> Router:
        return self.choice or softmax_router(normalized=self.norm_topk_prob)


def read_clamped_glu(read: ConfigReader) -> ClampedGLU:
    """The scalars of gpt-oss's gate, ``swiglu_limit`` and ``swiglu_alpha``."""
    return ClampedGLU(read.number("swiglu_limit", 7.0), read.number("swiglu_alpha", 1.702))


def read_expert_counts(
    read: ConfigReader, num_experts: int, num_experts_per_tok: int
) -> tuple[int, int]:
    """The numbers of a layer's experts, by its old or its new key, and of those a token meets.

    Args:
        read: The config.json.
        num_experts: The first, where no key says it.
        num_experts_per_tok: The second, where no key says it.

    Raises:
        UnsupportedModelError: If a token would meet more than there are.
    """
    new = read.config.get("num_experts") is not None
    key = "num_experts" if new else "num_local_experts"
    count = read.integer(key, num_experts)
    top = read.integer("num_experts_per_tok", num_experts_per_tok)
    check_expert_counts(read, (key, count), ("num_experts_per_tok", top))
    return count, top


def check_expert_counts(read: ConfigReader, experts: tuple[str, int], top: tuple[str, int]) -> None:
    """Refuses what a mixture cannot be.

    Args:
        read: The config.json.
        experts: The key of the number of a layer's experts, and the number.
        top: The same of those that a token meets.

    Raises:
        UnsupportedModelError: If a token would meet more than there are.
    """
    if top[1] > experts[1]:
        raise UnsupportedModelError(
            f"config.json: {top[0]} {top[1]} exceeds {experts[0]} {experts[1]}"
        )


def read_balance_loss(read: ConfigReader, coefficient: float = 0.001) -> BalanceLoss:
    """The loss that balances experts, by ``output_router_logits`` and ``router_aux_loss_coef``.

    Args:
        read: The config.json.
        coefficient: Its factor, where no key says it.
    """
    return BalanceLoss(
        read.number("router_aux_loss_coef", coefficient), read.flag("output_router_logits")
    )


def refuse_balance_loss(read: ConfigReader) -> None:
    """Refuses the same of a family for which transformers computes no such loss.

    Raises:
        UnsupportedModelError: If it is asked for.
    """
    if read.flag("output_router_logits"):
        raise UnsupportedModelError(
            "config.json: output_router_logits = true asks for a loss that balances the experts, "
            "which transformers does not compute for this family: set it to false"
        )


def sparse_layers(read: ConfigReader, layers: int) -> list[bool]:
    """Whether each layer has experts, by ``decoder_sparse_step`` and ``mlp_only_layers``.

    Args:
        read: The config.json.
        layers: How many there are.

    Raises:
        UnsupportedModelError: If the second is no list of numbers.
    """
    dense = read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise UnsupportedModelError("config.json: mlp_only_layers must be a list of integers")
    step = read.integer("decoder_sparse_step", 1)
    dense = set(dense)
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]
