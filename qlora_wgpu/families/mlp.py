"""The MLP of a layer: gated in two layers or one, or plain; and how each is traced."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.dimensions import Dimensions
from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS


def read_activation(read: ConfigReader, default: str = "silu") -> str:
    """``hidden_act``, which must be one that is computed."""
    name: str = read.choice("hidden_act", tuple(ACTIVATIONS), default)
    return name


@dataclass(frozen=True)
class GatedMLP:
    """down_proj(activation(gate_proj(x)) · up_proj(x)).

    Attributes:
        dimensions: The decoder's dimensions.
        activation: The gate's activation.
        bias: Whether all three have biases.
    """

    dimensions: Dimensions
    activation: str
    bias: bool = False

    def weights(self, at: str) -> Weights:
        """The linear layers of the layer whose names begin so."""
        hidden_size, inner = self.dimensions.hidden_size, self.dimensions.intermediate_size
        gate = LinearSpec(f"{at}mlp.gate_proj", inner, hidden_size, self.bias)
        up = LinearSpec(f"{at}mlp.up_proj", inner, hidden_size, self.bias)
        down = LinearSpec(f"{at}mlp.down_proj", hidden_size, inner, self.bias)
        return Weights((gate, up, down))

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Applies it to x; see ``LayerOps.linear_out`` for what becomes of the result."""
        names = (f"{at}mlp.gate_proj", f"{at}mlp.up_proj")
        grouped = ops.group(x, dict.fromkeys(names, False))
        gate, up = (grouped.get(name) or ops.linear(x, name) for name in names)
        y = ops.glu(gate, up, self.activation)
        return ops.linear_out(y, f"{at}mlp.down_proj", residual, scale)


@dataclass(frozen=True)
class FusedGatedMLP:
    """``GatedMLP`` with gate and up as one layer, ``gate_up_proj``."""

    dimensions: Dimensions
    activation: str

    def weights(self, at: str) -> Weights:
        """The linear layers of the layer whose names begin so."""
        hidden_size, inner = self.dimensions.hidden_size, self.dimensions.intermediate_size
        gate_up = LinearSpec(f"{at}mlp.gate_up_proj", 2 * inner, hidden_size)
        return Weights((gate_up, LinearSpec(f"{at}mlp.down_proj", hidden_size, inner)))

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Applies it to x; see ``LayerOps.linear_out`` for what becomes of the result."""
        inner = self.dimensions.intermediate_size
        gate_up = ops.linear(x, f"{at}mlp.gate_up_proj")
        gate, up = ops.columns(gate_up, 0, inner), ops.columns(gate_up, inner, inner)
        y = ops.glu(gate, up, self.activation)
        return ops.linear_out(y, f"{at}mlp.down_proj", residual, scale)


@dataclass(frozen=True)
class PlainMLP:
    """c_proj(activation(c_fc(x))).

    Attributes:
        dimensions: The decoder's dimensions.
        activation: Between the two.
        bias: Whether both have biases.
    """

    dimensions: Dimensions
    activation: str
    bias: bool

    def weights(self, at: str) -> Weights:
        """The linear layers of the layer whose names begin so."""
        hidden_size, inner = self.dimensions.hidden_size, self.dimensions.intermediate_size
        c_fc = LinearSpec(f"{at}mlp.c_fc", inner, hidden_size, self.bias)
        return Weights((c_fc, LinearSpec(f"{at}mlp.c_proj", hidden_size, inner, self.bias)))

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Applies it to x; see ``LayerOps.linear_out`` for what becomes of the result."""
        y = ops.activation(ops.linear(x, f"{at}mlp.c_fc"), self.activation)
        return ops.linear_out(y, f"{at}mlp.c_proj", residual, scale)
