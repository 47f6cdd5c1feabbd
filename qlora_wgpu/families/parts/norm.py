"""Norms of the residual stream: their weights, and how each is traced."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import Weights
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class RMSNorm:
    """Division by the root of the mean square."""

    eps: float  # added under the root
    offset: float = 0.0  # added to the stored weight: 1 where files hold weight - 1

    def weights(self, name: str, size: int) -> Weights:
        """The weight of the module of that name."""
        return Weights(norms={f"{name}.weight": size})

    def trace(self, ops: LayerOps, x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
        """Normalizes x for linear layers to read, or to float32 with the residual added."""
        return ops.rms_norm(x, name, self.eps, residual)


@dataclass(frozen=True)
class LayerNorm:
    """Subtraction of the mean, division by the deviation."""

    eps: float  # added to the variance
    bias: bool  # whether there is one
    offset: float = 0.0  # added to the stored weight: 1 where files hold weight - 1
    weight: bool = True  # whether there is one; without, there is no bias either

    def weights(self, name: str, size: int) -> Weights:
        """The weight, and the bias, if there are any, of the module of that name."""
        if not self.weight:
            return Weights()
        leaves = ("weight", "bias") if self.bias else ("weight",)
        return Weights(norms={f"{name}.{leaf}": size for leaf in leaves})

    def trace(self, ops: LayerOps, x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
        """Normalizes x for linear layers to read."""
        if residual is not None:
            raise GraphError(f"{name}: a LayerNorm cannot stand after a half of a layer")
        if not self.weight:
            return ops.plain_layer_norm(x, self.eps)
        return ops.layer_norm(x, name, self.eps)


Norm = RMSNorm | LayerNorm
