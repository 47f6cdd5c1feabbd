"""A decoder with several residual streams, of which its layers compute one (Gemma 3n)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.parts.decoder import STREAM
from qlora_wgpu.families.parts.layer_ops import LayerOps, State
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.shared_kv import INPUTS, SharingDecoder, SharingLayer
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.altup import MOST_STREAMS

__all__ = ["MOST_STREAMS", "AltUp", "AltUpDecoder", "AltUpLayer", "Laurel"]

_OTHERS = "other streams"
_MIN_SQUARE = 1e-5  # the smallest mean square of a stream that is brought to another's magnitude


@dataclass(frozen=True)
class AltUp:
    """Alternating updates (Baykal et al., 2023): a layer predicts all streams, and computes one.

    What it computes differs from its prediction by the innovation, which corrects all streams.
    """

    hidden_size: int  # elements of a row of each stream
    streams: int  # the number of streams
    active: int  # the number of the stream that layers compute
    eps: float  # added under the norm's root
    scales: bool  # whether the corrected stream is scaled before it gates a layer's own input

    def weights(self, at: str) -> Weights:
        at += "altup."
        linears = (
            LinearSpec(f"{at}modality_router", self.streams, self.hidden_size),
            LinearSpec(f"{at}prediction_coefs", self.streams**2, self.streams),
            LinearSpec(f"{at}correction_coefs", self.streams, self.streams),
        )
        scale = {f"{at}correct_output_scale": self.hidden_size} if self.scales else {}
        norm = RMSNorm(self.eps).weights(f"{at}router_norm", self.hidden_size)
        return Weights(linears, scale) + norm

    def predict(self, ops: LayerOps, h: Tensor, others: Tensor, at: str) -> tuple[Tensor, Tensor]:
        """The predicted active stream, and the others."""
        coefs = self._coefs(ops, h, at, "prediction_coefs")
        return ops.altup_predict(h, others, coefs, self.active)

    def gains(self, ops: LayerOps, made: Tensor, at: str) -> Tensor:
        """How much of the innovation each stream gets, less one."""
        return self._coefs(ops, made, at, "correction_coefs")

    def _coefs(self, ops: LayerOps, h: Tensor, at: str, name: str) -> Tensor:
        at += "altup."
        x = ops.rms_norm(h, f"{at}router_norm", self.eps)
        factor = 1 / self.hidden_size
        x = ops.linear(x, f"{at}modality_router", multiplier=factor, float32=True)
        return ops.linear(ops.tanh(x), f"{at}{name}", float32=True)

    def scaled(self, ops: LayerOps, h: Tensor, at: str) -> Tensor:
        """The corrected stream for the gate of a layer's own input: an operand."""
        if not self.scales:
            return ops.operand(h)
        return ops.scaled_columns(h, f"{at}altup.correct_output_scale")


@dataclass(frozen=True)
class Laurel:
    """A learned augmented residual layer: x + norm(right(left(x))), of low rank."""

    hidden_size: int  # elements of x
    rank: int  # elements of left(x)
    eps: float  # added under the norm's root

    def weights(self, at: str) -> Weights:
        at += "laurel."
        linears = (
            LinearSpec(f"{at}linear_left", self.rank, self.hidden_size),
            LinearSpec(f"{at}linear_right", self.hidden_size, self.rank),
        )
        norm = RMSNorm(self.eps).weights(f"{at}post_laurel_norm", self.hidden_size)
        return Weights(linears) + norm

    def trace(self, ops: LayerOps, x: Tensor, residual: Tensor, at: str) -> Tensor:
        """Its output and the residual, divided by √2."""
        at += "laurel."
        y = ops.linear(ops.linear(x, f"{at}linear_left"), f"{at}linear_right", float32=True)
        h = ops.rms_norm(y, f"{at}post_laurel_norm", self.eps, residual)
        return ops.scaled_sum(h, x, math.sqrt(0.5))


@dataclass(frozen=True)
class AltUpLayer(SharingLayer):
    """A layer of several streams, which adds its own input of every token to all but the first."""

    altup: AltUp = field(kw_only=True)
    laurel: Laurel = field(kw_only=True)
    scalar: str = ""

    def weights(self, at: str, hidden_size: int) -> Weights:
        before = self.altup.weights(at) + self.laurel.weights(at)
        return before + super().weights(at, hidden_size)

    def trace(self, ops: LayerOps, state: State, i: int, at: str) -> State:
        """The state after the layer, including keys and values for later layers."""
        order, altup = self.order, self.altup
        predicted, others = altup.predict(ops, state[STREAM], state[_OTHERS], at)
        x = self._before(ops, predicted, at, order.before_attention)
        made, kept = self.attended(ops, x, state, at)
        h = self._after(ops, made, predicted, at, order.after_attention)
        h = self.laurel.trace(ops, x, h, at)
        assert self.mlp is not None
        made = self.mlp.trace(ops, self._before(ops, h, at, order.before_mlp), at, None, 1.0)
        h = self._after(ops, made, h, at, order.after_mlp)
        gains = altup.gains(ops, h, at)
        correct = [predicted, h, gains, altup.active]
        corrected = ops.altup_correct(predicted, *correct)
        assert self.inputs is not None
        own = self.inputs.gated(ops, altup.scaled(ops, corrected, at), state[INPUTS], i, at)
        added = self.inputs.normed(ops, own, at)
        if altup.active > 0:
            corrected = self.inputs.normed(ops, own, at, corrected)
        others = ops.altup_correct(others, *correct, added)
        return {**state, STREAM: corrected, _OTHERS: others, **kept}


@dataclass(frozen=True)
class AltUpDecoder(SharingDecoder):
    """A decoder of ``AltUpLayer``: its streams begin and end as projections of equal magnitude."""

    altup: AltUp = field(kw_only=True)

    def weights(self) -> Weights:
        size = self.dimensions.hidden_size
        first, last = (
            Weights(tuple(LinearSpec(name, size, size) for name in self._names(kind)))
            for kind in ("projections", "unembed_projections")
        )
        return first + super().weights() + last

    def embedded(self, ops: LayerOps) -> State:
        state = super().embedded(ops)
        h = state[STREAM]
        x, streams = ops.operand(h), [h]
        for name in self._names("projections"):
            streams.append(ops.rms_match(ops.linear(x, name, float32=True), h, _MIN_SQUARE))
        active = streams.pop(self.altup.active)
        return {**state, STREAM: active, _OTHERS: ops.stacked(streams)}

    def stream(self, ops: LayerOps, state: State) -> Tensor:
        """The sum of all streams: of their mean, the final norm's epsilon is in proportion."""
        streams = [*ops.unstacked(state[_OTHERS], self.altup.streams - 1)]
        streams.insert(self.altup.active, state[STREAM])
        first, *rest = streams
        total = first
        for name, h in zip(self._names("unembed_projections"), rest, strict=True):
            x = ops.linear(ops.operand(h), name, float32=True)
            total = ops.rms_match(x, first, _MIN_SQUARE, total)
        return total

    def _names(self, kind: str) -> list[str]:
        return [f"{self.prefix}altup_{kind}.{i}" for i in range(self.altup.streams - 1)]
