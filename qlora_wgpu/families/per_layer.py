"""Embeddings of a token for each layer, beside that of the input (Gemma 4's PLE)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.families.norm import RMSNorm
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class PerLayerInputs:
    """What each layer is given of every token: (norm(projection(embedding)) + row) / √2.

    Attributes:
        hidden_size: Elements of a row of the residual stream.
        size: Elements that a layer is given.
        vocab_size: Rows of the table, which the host looks up.
        activation: Of the gate of a layer's input.
        eps: Added under the norms' roots.
    """

    hidden_size: int
    size: int
    vocab_size: int
    activation: str
    eps: float

    def weights(self, prefix: str, layers: int) -> Weights:
        """The table, and what is projected from the embedding, of all layers."""
        wide = layers * self.size
        return Weights(
            (LinearSpec(f"{prefix}per_layer_model_projection", wide, self.hidden_size),),
            {f"{prefix}per_layer_projection_norm.weight": self.size},
            tables={f"{prefix}embed_tokens_per_layer.weight": (self.vocab_size, wide)},
        )

    def trace(self, ops: LayerOps, h: Tensor, prefix: str) -> Tensor:
        """All layers' inputs side by side, (rows, layers · size) operand."""
        x = ops.linear(ops.operand(h), f"{prefix}per_layer_model_projection")
        # The projection's factor 1 / √hidden_size tells under the norm's root alone.
        eps = self.eps * self.hidden_size
        x = ops.qk_norm(x, f"{prefix}per_layer_projection_norm", eps)
        half = math.sqrt(0.5)
        rows = f"{prefix}embed_tokens_per_layer.weight"
        return ops.with_rows(x, rows, half, half * math.sqrt(self.size))

    def layer_weights(self, at: str) -> Weights:
        """What the layer whose names begin so does with its input."""
        gate, projection = f"{at}per_layer_input_gate", f"{at}per_layer_projection"
        linears = (
            LinearSpec(gate, self.size, self.hidden_size),
            LinearSpec(projection, self.hidden_size, self.size),
        )
        return Weights(linears) + self._norm.weights(self._norm_name(at), self.hidden_size)

    def trace_layer(self, ops: LayerOps, h: Tensor, inputs: Tensor, i: int, at: str) -> Tensor:
        """The residual stream with the i-th layer's input added, gated by what it is so far."""
        gate = ops.linear(ops.operand(h), f"{at}per_layer_input_gate")
        x = ops.glu(gate, ops.columns(inputs, i * self.size, self.size), self.activation)
        x = ops.linear(x, f"{at}per_layer_projection", float32=True)
        return self._norm.trace(ops, x, self._norm_name(at), residual=h)

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.eps)

    @staticmethod
    def _norm_name(at: str) -> str:
        return f"{at}post_per_layer_input_norm"
