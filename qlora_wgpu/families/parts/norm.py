"""Norms of the residual stream: their weights, and how each is traced."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import Weights
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class RMSNorm:
    """Division by the root of the mean square.

    Attributes:
        eps: Added under the root.
        offset: Added to the stored weight: 1 where files hold weight - 1.
    """

    eps: float
    offset: float = 0.0

    def weights(self, name: str, size: int) -> Weights:
        """The weight of the module of that name."""
        return Weights(norms={f"{name}.weight": size})

    def trace(self, ops: LayerOps, x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
        """Normalizes x for linear layers to read, or to float32 with the residual added."""
        return ops.rms_norm(x, name, self.eps, residual)


@dataclass(frozen=True)
class LayerNorm:
    """Subtraction of the mean, division by the deviation.

    Attributes:
        eps: Added to the variance.
        bias: Whether there is one.
        offset: Added to the stored weight: 1 where files hold weight - 1.
        weight: Whether there is one; without, there is no bias either.
    """

    eps: float
    bias: bool
    offset: float = 0.0
    weight: bool = True

    def weights(self, name: str, size: int) -> Weights:
        """The weight, and the bias, if there are any, of the module of that name."""
        if not self.weight:
            return Weights()
        leaves = ("weight", "bias") if self.bias else ("weight",)
        return Weights(norms={f"{name}.{leaf}": size for leaf in leaves})

    def trace(self, ops: LayerOps, x: Tensor, name: str, residual: Tensor | None = None) -> Tensor:
        """Normalizes x for linear layers to read.

        Raises:
            GraphError: If it is to follow a half of a layer, which is not computed.
        """
        if residual is not None:
            raise GraphError(f"{name}: a LayerNorm cannot stand after a half of a layer")
        if not self.weight:
            return ops.plain_layer_norm(x, self.eps)
        return ops.layer_norm(x, name, self.eps)


Norm = RMSNorm | LayerNorm
