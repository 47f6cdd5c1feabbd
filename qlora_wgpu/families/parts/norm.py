"""Norms of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import NormSize, Weights
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class RMSNorm:
    """RMSNorm."""

    eps: float  # added under the root
    offset: float = 0.0  # added to the stored weight: 1 if files store weight - 1
    weight: bool = True  # whether there is a weight
    as_stored: bool = False  # whether it has no offset, unlike the model's other norms

    def weights(self, name: str, size: int) -> Weights:
        norms: dict[str, NormSize] = {f"{name}.weight": size} if self.weight else {}
        return Weights(norms=norms, as_stored=frozenset(norms if self.as_stored else ()))

    def trace(self, ops: LayerOps, x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
        """Normalizes x to an operand, or to float32 with the residual added."""
        if not self.weight:
            return ops.plain_rms_norm(x, self.eps, residual)
        return ops.rms_norm(x, name, self.eps, residual)


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm."""

    eps: float  # added to the variance
    bias: bool  # whether there is a bias
    offset: float = 0.0  # added to the stored weight: 1 if files store weight - 1
    weight: bool = True  # whether there is a weight; without one there is no bias either

    def weights(self, name: str, size: int) -> Weights:
        if not self.weight:
            return Weights()
        leaves = ("weight", "bias") if self.bias else ("weight",)
        return Weights(norms={f"{name}.{leaf}": size for leaf in leaves})

    def trace(self, ops: LayerOps, x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            raise GraphError(f"{name}: a LayerNorm cannot be a post-norm")
        if not self.weight:
            return ops.plain_layer_norm(x, self.eps)
        return ops.layer_norm(x, name, self.eps)


Norm = RMSNorm | LayerNorm
