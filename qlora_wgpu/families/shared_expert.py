"""An expert that every token meets, beside those that a router chooses for it."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.families.mlp import FusedGatedMLP, GatedMLP
from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class SharedExpert:
    """sigmoid(gate(x)) · mlp(x), or mlp(x) alone.

    Attributes:
        mlp: The expert, by its name within a layer.
        gate: The name within a layer of the linear layer that makes a number of each token, if
            there is one.
    """

    mlp: GatedMLP | FusedGatedMLP
    gate: str | None = None

    def weights(self, at: str) -> Weights:
        """The linear layers of the layer whose names begin so."""
        weights = self.mlp.weights(at)
        if self.gate is not None:
            hidden_size = self.mlp.dimensions.hidden_size
            weights += Weights((LinearSpec(f"{at}{self.gate}", 1, hidden_size),))
        return weights

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Adds scale times the expert's output for x to the residual; or that alone, in float32.

        Raises:
            GraphError: If what has a gate is to be multiplied, too, which is not computed.
        """
        if self.gate is None:
            return self.mlp.trace(ops, x, at, residual, scale)
        if scale != 1.0:
            raise GraphError(f"{at}{self.gate}: what has a gate is added to the residual as it is")
        gate = ops.linear(x, f"{at}{self.gate}", float32=True)
        return ops.row_gate(self.mlp.trace(ops, x, at, None, 1.0), gate, residual)
