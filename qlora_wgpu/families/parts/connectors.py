"""Connectors of vision towers: from patches' hidden states to the language model's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.norm import Norm, RMSNorm
from qlora_wgpu.families.parts.vision import TowerMatrix, TowerRow, TowerWeights
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.tensor import mean_of_rows, merged_rows, standardized

NamedNorm = tuple[str, Norm, int]
"""A norm with the prefix of its weights and its size."""


def _norms(*named: NamedNorm | None) -> TowerWeights:
    weights = TowerWeights()
    for name, norm, size in filter(None, named):
        weights += TowerWeights.of_norm(norm, name, size)
    return weights


@dataclass(frozen=True)
class Projector:
    """Linear layers of merged patches, with an activation before the last one."""

    layers: tuple[TowerMatrix, ...]
    activation: str | None = None
    merge: int = 1  # patches of a side that are merged
    before: NamedNorm | None = None  # of the patches
    after: NamedNorm | None = None  # of the merged ones
    # The first layer's further matrices, each for another hidden state.
    further: tuple[TowerMatrix, ...] = ()

    def weights(self) -> TowerWeights:
        return TowerWeights((*self.layers, *self.further)) + _norms(self.before, self.after)

    @property
    def out_features(self) -> int:
        return self.layers[-1].out_features

    def trace(self, ops: LayerOps, states: Sequence[Tensor]) -> list[Tensor]:
        """The features, float32."""
        x, *rest = [self._merged(ops, state) for state in states]
        first, *others = self.layers
        y = ops.linear(x, first.name, float32=bool(rest) or not others)
        for x, matrix in zip(rest, self.further, strict=True):
            y = ops.linear(x, matrix.name, y)
        for layer in others:
            is_last = layer is others[-1]
            if is_last and self.activation is not None:
                y = ops.activation(y, self.activation)
            y = ops.linear(y, layer.name, float32=is_last)
        return [y]

    def _merged(self, ops: LayerOps, x: Tensor) -> Tensor:
        if self.before is not None:
            name, norm, _ = self.before
            x = norm.trace(ops, x, name)
        if self.merge > 1:
            x = merged_rows(ops.g, x, self.merge**2)
        if self.after is not None:
            name, norm, _ = self.after
            x = norm.trace(ops, x, name)
        return ops.operand(x)


@dataclass(frozen=True)
class PooledProjector:
    """One layer of the norm of averaged patches, as in Gemma 3."""

    layer: TowerMatrix
    norm: RMSNorm
    norm_name: str
    merge: int  # patches of a side that are averaged

    def weights(self) -> TowerWeights:
        norm = self.norm_name, self.norm, self.layer.in_features
        return TowerWeights((self.layer,)) + _norms(norm)

    @property
    def out_features(self) -> int:
        return self.layer.out_features

    def trace(self, ops: LayerOps, states: Sequence[Tensor]) -> list[Tensor]:
        """The features, float32."""
        (x,) = states
        x = self.norm.trace(ops, mean_of_rows(ops.g, x, self.merge**2), self.norm_name)
        return [ops.linear(x, self.layer.name, float32=True)]


@dataclass(frozen=True)
class StandardizedProjector:
    """One layer of the norm, without a weight, of averaged patches that are scaled (Gemma 4)."""

    layer: TowerMatrix
    eps: float  # of the norm
    merge: int  # patches of a side that are averaged
    factor: float  # of the averages
    # Tensors by column that are subtracted next, and multiplied by then; None without.
    statistics: tuple[str, str] | None = None

    def weights(self) -> TowerWeights:
        of_column = TowerRow((self.layer.in_features,))
        return TowerWeights((self.layer,), dict.fromkeys(self.statistics or (), of_column))

    @property
    def out_features(self) -> int:
        return self.layer.out_features

    def trace(self, ops: LayerOps, states: Sequence[Tensor]) -> list[Tensor]:
        """The features, float32."""
        (x,) = states
        x, eps = mean_of_rows(ops.g, x, self.merge**2), self.eps
        if self.statistics is None:
            eps /= self.factor**2  # the same without the factor
        else:
            bias, scale = map(ops.small, self.statistics)
            x = standardized(ops.g, x, bias, scale, self.factor)
        return [ops.linear(ops.plain_rms_norm(x, eps), self.layer.name, float32=True)]


@dataclass(frozen=True)
class DeepStack:
    """A projector of the last hidden state, and further ones of earlier states (Qwen3-VL)."""

    last: Projector
    others: tuple[Projector, ...] = field(default_factory=tuple)

    def weights(self) -> TowerWeights:
        weights = self.last.weights()
        for other in self.others:
            weights += other.weights()
        return weights

    @property
    def out_features(self) -> int:
        return self.last.out_features

    def trace(self, ops: LayerOps, states: Sequence[Tensor]) -> list[Tensor]:
        """The features, float32, then those to add after the language model's first layers."""
        each = zip((self.last, *self.others), states, strict=True)
        return [projector.trace(ops, [state])[0] for projector, state in each]
