"""A transformer block that several Mamba layers share, each with low-rank terms (Zamba 2)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.parts.config import Dimensions
from qlora_wgpu.families.parts.decoder import STREAM, Decoder, Layer
from qlora_wgpu.families.parts.layer_ops import LayerOps, State
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import Rope
from qlora_wgpu.graph.tensor import Tensor

_EMBEDDING = "embedding"
_GATE_UP, _DOWN = "feed_forward.gate_up_proj", "feed_forward.down_proj"


@dataclass(frozen=True)
class SharedBlock:
    """MLP(norm(attention(norm(h, embedding)))), without residual additions.

    Layers share its weights but not adapters: transformers ties the weights of modules of their
    own. Files name the weights after the first of these layers.
    """

    dimensions: Dimensions  # the decoder's, with the heads of its attention
    eps: float  # of both norms
    rope: Rope | None  # None if it has no positions
    activation: str  # of the MLP's gate
    bias: bool  # whether the MLP's layers have biases
    rank: int  # of the low-rank terms that each use adds
    adapts_attention: bool  # whether queries, keys and values have such terms; gate and up do
    first: int  # the first layer that uses it
    use: int  # the number of this use, among those of all blocks

    def weights(self, at: str) -> Weights:
        sizes, stored = self.dimensions, self._stored(at)
        hidden_size, inner = sizes.hidden_size, sizes.intermediate_size
        attention = {
            f"self_attn.{name}_proj": (size, 2 * hidden_size)
            for name, size in self._projections.items()
        }
        shapes = {
            **attention,
            "self_attn.o_proj": (hidden_size, sizes.query_size),
            _GATE_UP: (2 * inner, hidden_size),
            _DOWN: (hidden_size, inner),
        }
        for name in [*(attention if self.adapts_attention else ()), _GATE_UP]:
            before, after = self._term(name)
            rows, columns = shapes[name]
            shapes |= {before: (self.rank, columns), after: (rows, self.rank)}
        at += "shared_transformer."
        linears = (
            LinearSpec(
                at + name, *shape, self.bias and name in (_GATE_UP, _DOWN),
                tied_to="" if at == stored else stored + name,
            )
            for name, shape in shapes.items()
        )  # fmt: skip
        norms = self._norm.weights(f"{stored}input_layernorm", 2 * hidden_size)
        norms += self._norm.weights(f"{stored}pre_ff_layernorm", hidden_size)
        return Weights(tuple(linears)) + norms

    def trace(self, ops: LayerOps, h: Tensor, embedding: Tensor, at: str) -> Tensor:
        """The block's output for the residual stream and the embedded tokens: an operand."""
        stored, inner = self._stored(at), self.dimensions.intermediate_size
        at += "shared_transformer."
        x = self._norm.trace(ops, ops.joined(h, embedding), f"{stored}input_layernorm")
        names = [f"self_attn.{name}_proj" for name in self._projections]
        ops.group(x, {at + name: self.adapts_attention for name in names})
        q, k, v = (
            self._with_term(ops, x, at, name) if self.adapts_attention else ops.linear(x, at + name)
            for name in names
        )
        head_dim = self.dimensions.head_dim
        if self.rope is not None:
            q, k = ops.ropes([q, k], self.rope, head_dim)
        o = ops.attention(q, k, v, head_dim, (head_dim / 2) ** -0.5)
        y = ops.linear(o, f"{at}self_attn.o_proj", float32=True)
        x = self._norm.trace(ops, y, f"{stored}pre_ff_layernorm")
        both = self._with_term(ops, x, at, _GATE_UP)
        gate, up = ops.columns(both, 0, inner), ops.columns(both, inner, inner)
        return ops.linear(ops.glu(gate, up, self.activation), at + _DOWN)

    def _with_term(self, ops: LayerOps, x: Tensor, at: str, name: str) -> Tensor:
        """The layer's output for x plus that of this use's low-rank term."""
        before, after = self._term(name)
        y = ops.linear(x, at + name, float32=True)
        return ops.operand(ops.linear(ops.linear(x, at + before), at + after, y))

    def _term(self, name: str) -> tuple[str, str]:
        """The layers of a layer's low-rank term."""
        module, _, leaf = name.rpartition(".")
        short = leaf.removesuffix("_proj") if leaf in ("q_proj", "k_proj", "v_proj") else ""
        term = f"{module}.linear_{short}_adapter_list" if short else f"{name}_adapter_list"
        return f"{term}.{self.use}.0", f"{term}.{self.use}.1"

    def _stored(self, at: str) -> str:
        """The block's prefix in files, where ``at`` is that of a layer."""
        return f"{at[:-1].rpartition('.')[0]}.{self.first}.shared_transformer."

    @property
    def _projections(self) -> dict[str, int]:
        keys = self.dimensions.key_value_size
        return {"q": self.dimensions.query_size, "k": keys, "v": keys}

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.eps)


@dataclass(frozen=True)
class HybridLayer(Layer):
    """h + Mamba(norm(h + linear(block(h, embedding))))."""

    block: SharedBlock = field(kw_only=True)
    name: str = "mamba_decoder"  # the module of Mamba and its norm

    def weights(self, at: str, hidden_size: int) -> Weights:
        linear = Weights((LinearSpec(f"{at}linear", hidden_size, hidden_size),))
        return self.block.weights(at) + linear + super().weights(f"{at}{self.name}.", hidden_size)

    def trace(self, ops: LayerOps, state: State, i: int, at: str) -> State:
        """The state after the layer; only Mamba's output is added to the residual stream."""
        assert self.attention is not None
        h, inside = state[STREAM], f"{at}{self.name}."
        made = self.block.trace(ops, h, state[_EMBEDDING], at)
        x = self._before(
            ops, ops.linear(made, f"{at}linear", h), inside, self.order.before_attention
        )
        return {**state, STREAM: self.attention.trace(ops, x, inside, h, 1.0)}


@dataclass(frozen=True)
class HybridDecoder(Decoder):
    """A decoder that has layers of ``HybridLayer``."""

    def embedded(self, ops: LayerOps) -> State:
        state = super().embedded(ops)
        return {**state, _EMBEDDING: state[STREAM]}

    def alone(self, i: int) -> Decoder:
        """A decoder of only the i-th layer, which has the weights of its block."""
        layer = self.layers[i]
        if isinstance(layer, HybridLayer):
            layer = replace(layer, block=replace(layer.block, first=0))
        return replace(self, layers=(layer,))
