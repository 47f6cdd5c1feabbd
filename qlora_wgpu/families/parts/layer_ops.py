"""Ops by the names of their weights, so that a forward pass reads like the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Modules
from qlora_wgpu.families.parts.rope import Rope
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.offload import StagingBuffers
from qlora_wgpu.graph.tensor import Tensor, padded, row
from qlora_wgpu.kernels.common import EXPERT_TILE, NEW_TOKENS_TILE
from qlora_wgpu.ops.altup import altup_correct, altup_predict, rms_match, stacked, unstacked
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers, RouterSums
from qlora_wgpu.ops.columns import (
    HeadPart,
    column_scale,
    columns,
    group_columns,
    head_parts,
)
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_gates, gated_delta_rule, short_conv
from qlora_wgpu.ops.experts import expert_linear
from qlora_wgpu.ops.image_features import add_features
from qlora_wgpu.ops.linear import largest_group, linear, linear_group
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.mamba import gated_group_norm, mamba_scan, mamba_steps
from qlora_wgpu.ops.modules import trained_rows, trained_whole
from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.ops.pointwise import (
    ClampedGLU,
    XIELUScalars,
    activation,
    clamped_glu,
    clip,
    gated_rms_norm,
    glu,
    qk_layer_norm,
    qk_norm,
    row_gate,
    scaled,
    scaled_sum,
    sigmoid_gate,
    sparse_glu,
    tanh,
    weighted_sum,
    xielu,
)
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.ops.routing import Routing, balance_sums, largest
from qlora_wgpu.ops.tensor import cast

State = dict[str, Tensor]
"""What one layer passes to the next."""
LayerTrace = Callable[[State], State]
_SUMS = "routers' sums"


class LayerOps:
    """Ops by the names of their weights, so that a forward pass reads like the model."""

    def __init__(self, g: Graph, modules: Modules, batch: BatchBuffers) -> None:
        self.g = g
        self.batch = batch
        self._modules = modules
        self._tables: dict[Rope, Tensor] = {}
        self._ones: dict[int, Tensor] = {}
        self._made: dict[str, Tensor] = {}  # results of grouped layers, until ``linear`` takes them

    # -- ops with weights ------------------------------------------------------------------

    def embedding(self, scale: float = 1.0, noise_scale: float = 1.0) -> Tensor:
        """The embedded tokens, (rows, hidden_size) float32.

        A factor that the model applies to the embedding module's output also applies to the noise
        and to images' features.
        """
        of = self._modules
        return embedding(
            self.g, of.embedding, self.batch, scale, noise_scale, of.embedding_lora, of.padding_idx,
            noise_scale,
        )  # fmt: skip

    def normed_embedding(self, eps: float) -> Tensor:
        """The embedded tokens if the embedding's module normalizes them, without a weight."""
        of = self._modules
        trains = trained_rows(of.embedding) or trained_whole(of.embedding) or of.embedding_lora
        if self.batch.noise > 0 or trains is not None:
            raise UnsupportedModelError(
                "the embedding of this model normalizes its rows: neftune_noise_alpha, and "
                "training the embedding or rows of it, are not supported"
            )
        return self.plain_rms_norm(self.embedding(), eps, float32=True)

    def with_features(self, x: Tensor, part: int) -> Tensor:
        """x plus a further part of the images' features in their rows, if the batch has images."""
        if self.batch.image_rows is None:
            return x
        return add_features(self.g, x, self.batch, part)

    def linear(
        self, x: Tensor, name: str, residual: Tensor | None = None, **options: Any
    ) -> Tensor:
        if name in self._made:
            return self._made.pop(name)
        return linear(self.g, x, self._modules.linears[name], self.batch, residual, **options)

    def group(self, x: Tensor, names: Mapping[str, bool]) -> None:
        """Computes layers of x, each float32 or not, as one product if possible, for ``linear``."""
        layers = [self._modules.linears[name] for name in names]
        layers = largest_group(self.g, layers, self.batch)
        if layers:
            made = [layer.name for layer in layers]
            float32 = [names[name] for name in made]
            results = linear_group(self.g, x, layers, self.batch, float32)
            self._made.update(zip(made, results, strict=True))

    def linear_out(self, x: Tensor, name: str, residual: Tensor | None, scale: float) -> Tensor:
        """A half's last layer: added to the residual, or only its float32 output for a norm."""
        if residual is None:
            return self.linear(x, name, float32=True)
        return self.linear(x, name, residual, multiplier=scale)

    def expert_linear(self, x: Tensor, name: str, routing: Routing) -> Tensor:
        layer = self._modules.experts[name]
        return expert_linear(self.g, x, layer, routing, self.batch)

    def router(self, x: Tensor, name: str, multiplier: float = 1.0) -> Tensor:
        layer = self._modules.routers[name]
        return linear(self.g, x, layer, self.batch, multiplier=multiplier, float32=True)

    @property
    def expert_tile(self) -> int:
        return NEW_TOKENS_TILE if self.batch.decodes else EXPERT_TILE

    def balance(self, logits: Tensor, routing: Routing, *, by_logits: bool) -> None:
        """Sums a router's choices, of the largest logits or not, if the batch asks for it."""
        routers = self.batch.routers
        if routers is not None:
            ids = routing.ids if by_logits else largest(self.g, logits, routing.top_k)
            routers.sums = balance_sums(self.g, logits, ids, self.batch, routers.sums)
            routers.top_k = routing.top_k

    def small(self, name: str) -> Tensor:
        return self._modules.norms[name]

    def _weight_and_bias(self, name: str) -> tuple[Tensor, Tensor | None]:
        norms = self._modules.norms
        return norms[name + ".weight"], norms.get(name + ".bias")

    def rms_norm(
        self,
        x: Tensor,
        name: str,
        eps: float,
        residual: Tensor | None = None,
        *,
        float32: bool = False,
    ) -> Tensor:
        weight = self._modules.norms[name + ".weight"]
        return rms_norm(self.g, x, weight, eps, residual, float32=float32)

    def plain_rms_norm(
        self, x: Tensor, eps: float, residual: Tensor | None = None, *, float32: bool = False
    ) -> Tensor:
        weight = self._weight_of_ones(x.columns)
        return rms_norm(self.g, x, weight, eps, residual, float32=float32)

    def qk_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return qk_norm(self.g, x, self._modules.norms[name + ".weight"], eps)

    def plain_qk_norm(self, x: Tensor, head_dim: int, eps: float) -> Tensor:
        return qk_norm(self.g, x, self._weight_of_ones(head_dim), eps)

    def column_scale(self, x: Tensor, factors: Sequence[tuple[float, int]]) -> Tensor:
        """x with neighbouring columns scaled: factors and their numbers of columns."""
        each = np.repeat(*(np.array(part) for part in zip(*factors, strict=True)))
        array = np.zeros(padded(x.columns), np.float32)
        array[: x.columns] = each
        storage = self.g.constant("column factors", array).storage
        return column_scale(self.g, x, row("column factors", x.columns, "float32", storage))

    def scaled_columns(self, x: Tensor, name: str) -> Tensor:
        """x times the stored factors of its columns: an operand."""
        return column_scale(self.g, x, self._modules.norms[name])

    def _weight_of_ones(self, size: int) -> Tensor:
        """Ones in the layout of norms' weights, so that padding stays zero."""
        if size not in self._ones:
            padded_ones = (np.arange(padded(size)) < size).astype(np.float32)
            table = self.g.constant("ones", padded_ones)
            self._ones[size] = row("ones", size, "float32", table.storage)
        return self._ones[size]

    def qk_layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """LayerNorm of each head with its row of that module's weight, or a common one."""
        weight, bias = self._weight_and_bias(name)
        return qk_layer_norm(self.g, x, weight, eps, bias)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return layer_norm(self.g, x, *self._weight_and_bias(name), eps)

    def plain_layer_norm(self, x: Tensor, eps: float) -> Tensor:
        return layer_norm(self.g, x, self._weight_of_ones(x.columns), None, eps)

    def xielu(self, x: Tensor, name: str) -> Tensor:
        stored = (f"{name}.{field.name}" for field in fields(XIELUScalars))
        return xielu(self.g, x, XIELUScalars(*(self._modules.norms[each] for each in stored)))

    def scaled(self, x: Tensor, name: str) -> Tensor:
        return scaled(self.g, x, self._modules.norms[name])

    def with_rows(self, x: Tensor, name: str, factor: float, rows_factor: float) -> Tensor:
        """factor · x + rows_factor · the tokens' rows of that table."""
        rows = self.batch.rows_of(self._modules.tables[name]).table
        return weighted_sum(self.g, x, rows, factor, rows_factor)

    def short_conv(self, x: Tensor, name: str) -> Tensor:
        return short_conv(self.g, x, *self._weight_and_bias(name), self.batch)

    def causal_conv(self, x: Tensor, name: str) -> Tensor:
        """SiLU of the convolution with that module's weight, and bias if there is one."""
        return causal_conv(self.g, x, *self._weight_and_bias(name), self.batch)

    def gated_delta_gates(
        self, a: Tensor, b: Tensor, at: str, largest: float
    ) -> tuple[Tensor, Tensor]:
        """Decay and beta, at most ``largest``, of the delta net with the prefix ``at``."""
        norms = self._modules.norms
        scalars = norms[f"{at}A_log"], norms[f"{at}dt_bias"]
        return gated_delta_gates(self.g, a, b, *scalars, largest)

    def gated_rms_norm(self, x: Tensor, z: Tensor, name: str, eps: float) -> Tensor:
        return gated_rms_norm(self.g, x, z, self._modules.norms[name + ".weight"], eps)

    def mamba_steps(self, raw: Tensor, at: str, limits: tuple[float, float | None]) -> Tensor:
        """Time steps of the mixer with the prefix ``at``."""
        return mamba_steps(self.g, raw, self._modules.norms[f"{at}dt_bias"], limits)

    def mamba_scan(
        self, x: Tensor, bc: Tensor, dt: Tensor, at: str, heads: int, state_size: int
    ) -> Tensor:
        """The scan of the mixer with the prefix ``at``, within each sample."""
        a_log, d = (self._modules.norms[f"{at}{leaf}"] for leaf in ("A_log", "D"))
        return mamba_scan(self.g, x, bc, dt, a_log, d, self.batch, heads, state_size)

    def gated_group_norm(
        self, x: Tensor, z: Tensor, name: str, eps: float, groups: int, gate_first: bool = True
    ) -> Tensor:
        weight = self._modules.norms[name + ".weight"]
        return gated_group_norm(self.g, x, z, weight, eps, groups, gate_first=gate_first)

    # -- ops without -----------------------------------------------------------------------

    def rope(
        self, x: Tensor, rotation: Rope, head_dim: int, *, interleaved: bool = False
    ) -> Tensor:
        """Rotates every head by its token's position, and its sample's length if that matters."""
        return self.ropes([x], rotation, head_dim, interleaved=interleaved)[0]

    def ropes(
        self, xs: Sequence[Tensor], rotation: Rope, head_dim: int, *, interleaved: bool = False
    ) -> list[Tensor]:
        table, rows = self._table(rotation)
        dim = rotation.rotary_dim
        return rope(
            self.g, xs, table, self.batch, head_dim, dim, interleaved=interleaved, rows=rows
        )

    def _table(self, rotation: Rope) -> tuple[Tensor, Tensor | None]:
        """Angles by position, or angles and rows that the host writes for every token."""
        if rotation.by_length or self.batch.axes is not None:
            angles = self.batch.angles_of(rotation)
            return angles.table, angles.rows
        if rotation not in self._tables:
            table = self.g.constant("rope table", rotation.table(self.batch.span))
            self._tables[rotation] = table
        return self._tables[rotation], self.batch.rotated

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: str | None = None,
    ) -> Tensor:
        of_heads, batch = None if sinks is None else self._modules.norms[sinks], self.batch
        if window is None and batch.images is not None and batch.images.only_sliding:
            batch = replace(batch, blocks=None)
        return attention(self.g, q, k, v, batch, head_dim, scale, window, softcap, of_heads)

    def glu(self, gate: Tensor, up: Tensor, name: str) -> Tensor:
        return glu(self.g, gate, up, name)

    def sparse_glu(self, gate: Tensor, up: Tensor, name: str, deviations: float) -> Tensor:
        return sparse_glu(self.g, gate, up, name, deviations)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return sigmoid_gate(self.g, x, gate)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *sizes: int
    ) -> Tensor:
        """The gated delta rule within each sample; see ``ops.delta_net`` for the sizes."""
        return gated_delta_rule(self.g, q, k, v, decay, beta, self.batch, *sizes)

    def clamped_glu(self, gate: Tensor, up: Tensor, scalars: ClampedGLU) -> Tensor:
        return clamped_glu(self.g, gate, up, scalars)

    def row_gate(self, x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
        return row_gate(self.g, x, gate, residual)

    def activation(self, x: Tensor, name: str) -> Tensor:
        return activation(self.g, x, name)

    def tanh(self, x: Tensor) -> Tensor:
        return tanh(self.g, x)

    def scaled_sum(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        return scaled_sum(self.g, x, y, factor)

    def altup_predict(
        self, h: Tensor, others: Tensor, coefs: Tensor, active: int
    ) -> tuple[Tensor, Tensor]:
        return altup_predict(self.g, h, others, coefs, active)

    def altup_correct(self, base: Tensor, *given: Any) -> Tensor:
        """The active stream, or all others, corrected; see ``ops.altup`` for what is given."""
        return altup_correct(self.g, base, *given)

    def rms_match(
        self, x: Tensor, like: Tensor, floor: float, residual: Tensor | None = None
    ) -> Tensor:
        return rms_match(self.g, x, like, floor, residual)

    def stacked(self, xs: Sequence[Tensor]) -> Tensor:
        return stacked(self.g, xs)

    def unstacked(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return unstacked(self.g, x, count)

    def clip(self, x: Tensor, limit: float) -> Tensor:
        return clip(self.g, x, limit)

    def columns(self, x: Tensor, first: int, count: int) -> Tensor:
        return columns(self.g, x, first, count)

    def group_columns(
        self, x: Tensor, groups: int, group: int, first: int, widths: Sequence[int], **options: Any
    ) -> Tensor:
        """Equal parts of every group of columns, joined; see ``ops.group_columns``."""
        return group_columns(self.g, x, groups, group, first, widths, **options)

    def head_parts(self, parts: Sequence[HeadPart], heads: int, head_dim: int) -> Tensor:
        return head_parts(self.g, parts, heads, head_dim)

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        """The columns of x, then those of y, in float32."""
        parts = [HeadPart(each, 0, 0, each.columns) for each in (x, y)]
        return head_parts(self.g, parts, 1, x.columns + y.columns, float32=True)

    def operand(self, x: Tensor) -> Tensor:
        return cast(self.g, x)

    # -- layers ----------------------------------------------------------------------------

    def layers(self, state: State, layers: Sequence[LayerTrace], *, checkpointing: bool) -> State:
        """Applies layers in order, recomputing them in the backward pass if ``checkpointing``.

        The state's names are the family's own; its first entry is the residual stream, which may be
        offloaded. Each layer passes the state on, with entries replaced or added.
        """
        end = 0
        if checkpointing:
            how = self.g.recomputation
            end = max(len(layers) - how.kept, 0)
            for first in range(0, end, how.together):
                after = min(first + how.together, end)
                # The backward pass reads the last segment's input at once.
                staging = how.staging if after < len(layers) else None
                state = self._recomputed(layers[first:after], state, staging)
        for layer in layers[end:]:
            state = layer(state)
        return state

    def _recomputed(
        self, layers: Sequence[LayerTrace], state: State, staging: StagingBuffers | None
    ) -> State:
        """The state after a segment whose intermediates are recomputed in the backward pass."""
        routers = self.batch.routers or RouterSums()
        if routers.sums is not None:  # routers' sums are passed along with the state
            state = {**state, _SUMS: routers.sums}
        names: list[str] = []

        def made(xs: Sequence[Tensor]) -> Sequence[Tensor]:
            given = dict(zip(state, xs, strict=True))
            after, routers.sums = given, given.get(_SUMS)
            for layer in layers:
                after = layer(after)
            if routers.sums is not None:
                after = {**after, _SUMS: routers.sums}
            names[:] = [name for name, x in after.items() if x is not given.get(name)]
            return [after[name] for name in names]

        if staging is None:
            outputs = self.g.checkpoint(made, [*state.values()])
        else:
            outputs = self.g.checkpoint_offloaded(made, [*state.values()], staging)
        handed_on = state | dict(zip(names, outputs, strict=True))
        routers.sums = handed_on.pop(_SUMS, None)
        return handed_on
