"""A decoder whose later layers attend to the keys and values of earlier ones (Gemma 3n, 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.decoder import STREAM, Decoder, Layer
from qlora_wgpu.families.parts.layer_ops import LayerOps, State
from qlora_wgpu.families.parts.moe import MixtureBeside
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class PerLayerInputs:
    """Each layer's own input of every token: (norm(projection(embedding)) + row) / √2."""

    hidden_size: int  # elements of a row of the residual stream
    size: int  # elements of a layer's input
    vocab_size: int  # rows of the table, looked up by the host
    activation: str  # of the gate of a layer's input
    eps: float  # added under the norms' roots

    def weights(self, prefix: str, layers: int) -> Weights:
        wide = layers * self.size
        return Weights(
            (LinearSpec(f"{prefix}per_layer_model_projection", wide, self.hidden_size),),
            {f"{prefix}per_layer_projection_norm.weight": self.size},
            tables={f"{prefix}embed_tokens_per_layer.weight": (self.vocab_size, wide)},
        )

    def trace(self, ops: LayerOps, h: Tensor, prefix: str) -> Tensor:
        """All layers' inputs: an operand (rows, layers · size)."""
        x = ops.linear(ops.operand(h), f"{prefix}per_layer_model_projection")
        # The projection's factor 1 / √hidden_size only affects the norm's epsilon.
        eps = self.eps * self.hidden_size
        x = ops.qk_norm(x, f"{prefix}per_layer_projection_norm", eps)
        half = math.sqrt(0.5)
        rows = f"{prefix}embed_tokens_per_layer.weight"
        return ops.with_rows(x, rows, half, half * math.sqrt(self.size))

    def layer_weights(self, at: str) -> Weights:
        gate, projection = f"{at}per_layer_input_gate", f"{at}per_layer_projection"
        linears = (
            LinearSpec(gate, self.size, self.hidden_size),
            LinearSpec(projection, self.hidden_size, self.size),
        )
        return Weights(linears) + self._norm.weights(self._norm_name(at), self.hidden_size)

    def trace_layer(self, ops: LayerOps, h: Tensor, inputs: Tensor, i: int, at: str) -> Tensor:
        """Adds the i-th layer's input, gated by the residual stream, to that stream."""
        return self.normed(ops, self.gated(ops, ops.operand(h), inputs, i, at), at, h)

    def gated(self, ops: LayerOps, x: Tensor, inputs: Tensor, i: int, at: str) -> Tensor:
        """The i-th layer's input, gated by x, as wide as the residual stream, float32."""
        gate = ops.linear(x, f"{at}per_layer_input_gate")
        x = ops.glu(gate, ops.columns(inputs, i * self.size, self.size), self.activation)
        return ops.linear(x, f"{at}per_layer_projection", float32=True)

    def normed(self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None = None) -> Tensor:
        """The norm of what ``gated`` returns, added to the residual if there is one, float32."""
        return ops.rms_norm(x, self._norm_name(at), self.eps, residual, float32=True)

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.eps)

    @staticmethod
    def _norm_name(at: str) -> str:
        return f"{at}post_per_layer_input_norm"


INPUTS = "per-layer inputs"
"""The layers' own inputs in the state that layers pass on."""


@dataclass(frozen=True)
class SharingLayer(Layer):
    """A layer with pre- and post-norms, and possibly a factor of the residual stream at its end."""

    kind: str = ""  # a layer that shares keys and values uses those of the last of its kind
    keeps: bool = False  # whether later layers use its own
    inputs: PerLayerInputs | None = None  # its own input of every token, if any
    mixture: MixtureBeside | None = None  # the experts next to its MLP, if any
    scalar: str = "layer_scalar"  # the name of the factor; empty without one

    def weights(self, at: str, hidden_size: int) -> Weights:
        factor = {at + self.scalar: 1} if self.scalar else {}
        weights = super().weights(at, hidden_size) + Weights(norms=factor)
        if self.mixture is not None:
            weights += self.mixture.weights(at)
        return weights if self.inputs is None else weights + self.inputs.layer_weights(at)

    def trace(self, ops: LayerOps, state: State, i: int, at: str) -> State:
        """The state after the layer, including keys and values for later layers."""
        order, h = self.order, state[STREAM]
        x = self._before(ops, h, at, order.before_attention)
        made, kept = self.attended(ops, x, state, at)
        h = self._after(ops, made, h, at, order.after_attention)
        assert self.mlp is not None
        made = self.mlp.trace(ops, self._before(ops, h, at, order.before_mlp), at, None, 1.0)
        if self.mixture is not None:
            made = self.mixture.trace(ops, h, made, at)
        h = self._after(ops, made, h, at, order.after_mlp)
        if self.inputs is not None:
            h = self.inputs.trace_layer(ops, h, state[INPUTS], i, at)
        return {**state, STREAM: ops.scaled(h, at + self.scalar), **kept}

    def attended(self, ops: LayerOps, x: Tensor, state: State, at: str) -> tuple[Tensor, State]:
        """Attention's output for x in float32, and the keys and values that later layers use."""
        attention = self.attention
        assert isinstance(attention, Attention)
        q, pair, _ = attention.project(ops, x, at)
        names = [f"{self.kind} {part}" for part in ("keys", "values")]
        own = pair or (state[names[0]], state[names[1]])
        made = attention.attend(ops, q, own, at, None, 1.0)
        return made, dict(zip(names, own, strict=True)) if self.keeps else {}


@dataclass(frozen=True)
class SharingDecoder(Decoder):
    """A decoder of ``SharingLayer``."""

    inputs: PerLayerInputs | None = None  # the layers' own inputs of every token, if any

    def weights(self) -> Weights:
        if self.inputs is None:
            return super().weights()
        return self.inputs.weights(self.prefix, len(self.layers)) + super().weights()

    def embedded(self, ops: LayerOps) -> State:
        state = super().embedded(ops)
        if self.inputs is not None:
            state[INPUTS] = self.inputs.trace(ops, state[STREAM], self.prefix)
        return state

    def alone(self, i: int) -> Decoder:
        """A decoder of one layer with its own keys and values."""
        layer = self.layers[i]
        assert isinstance(layer.attention, Attention)
        own = replace(layer, attention=replace(layer.attention, shared=False))
        return replace(self, layers=(own,))
