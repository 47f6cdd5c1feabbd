"""The MLP of a layer: gated, with gate and up separate or fused, or plain."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import LinearSpec, NormSize, Weights
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.pointwise import ACTIVATIONS

XIELU = "xielu"


def read_activation(read: ConfigReader, default: str = "silu", key: str = "hidden_act") -> str:
    name: str = read.choice(key, tuple(ACTIVATIONS), default)
    return name


@dataclass(frozen=True)
class GatedMLP:
    """down_proj(activation(gate_proj(x)) · up_proj(x))."""

    dimensions: Dimensions  # the decoder's dimensions
    activation: str  # the gate's activation
    bias: bool = False  # whether all three have biases
    name: str = "mlp"  # the module's name within a layer
    # The names of gate, up and down.
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gate_multiplier: float = 1.0  # factor of gate_proj's output
    multiplier: float = 1.0  # factor of down_proj's output
    # If given, the gate's elements count from their mean plus this many standard deviations of a
    # token's, and those below are zero: ``activation_sparsity_pattern`` as a normal quantile.
    deviations: float | None = None

    def weights(self, at: str) -> Weights:
        hidden_size, inner = self.dimensions.hidden_size, self.dimensions.intermediate_size
        gate, up, down = (f"{at}{self.name}.{leaf}" for leaf in self.leaves)
        return Weights(
            (
                LinearSpec(gate, inner, hidden_size, self.bias),
                LinearSpec(up, inner, hidden_size, self.bias),
                LinearSpec(down, hidden_size, inner, self.bias),
            )
        )

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        *names, down = (f"{at}{self.name}.{leaf}" for leaf in self.leaves)
        if self.gate_multiplier == 1.0:
            ops.group(x, dict.fromkeys(names, False))
        gate = ops.linear(x, names[0], multiplier=self.gate_multiplier)
        up = ops.linear(x, names[1])
        if self.deviations is None:
            y = ops.glu(gate, up, self.activation)
        else:
            y = ops.sparse_glu(gate, up, self.activation, self.deviations)
        return ops.linear_out(y, down, residual, scale * self.multiplier)


@dataclass(frozen=True)
class FusedGatedMLP:
    """``GatedMLP`` with gate and up as one layer."""

    dimensions: Dimensions  # the decoder's dimensions
    activation: str  # the gate's activation
    name: str = "mlp"  # the module's name within a layer
    # The names of the fused gate and up, and of down.
    leaves: tuple[str, str] = ("gate_up_proj", "down_proj")

    def weights(self, at: str) -> Weights:
        hidden_size, inner = self.dimensions.hidden_size, self.dimensions.intermediate_size
        gate_up, down = (f"{at}{self.name}.{leaf}" for leaf in self.leaves)
        fused = LinearSpec(gate_up, 2 * inner, hidden_size)
        return Weights((fused, LinearSpec(down, hidden_size, inner)))

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        inner = self.dimensions.intermediate_size
        fused, down = (f"{at}{self.name}.{leaf}" for leaf in self.leaves)
        gate_up = ops.linear(x, fused)
        gate, up = ops.columns(gate_up, 0, inner), ops.columns(gate_up, inner, inner)
        y = ops.glu(gate, up, self.activation)
        return ops.linear_out(y, down, residual, scale)


@dataclass(frozen=True)
class PlainMLP:
    """down(activation(up(x))); xIELU has scalars that are stored with the model."""

    dimensions: Dimensions  # the decoder's dimensions
    activation: str  # between the two
    bias: bool  # whether both have biases
    leaves: tuple[str, str] = ("up_proj", "down_proj")  # the names of up and down
    name: str = "mlp"  # the module's name within a layer

    def weights(self, at: str) -> Weights:
        hidden_size, inner = self.dimensions.hidden_size, self.dimensions.intermediate_size
        up, down = (f"{at}{self.name}.{leaf}" for leaf in self.leaves)
        shapes: dict[str, NormSize] = {"alpha_p": 1, "alpha_n": 1, "beta": (), "eps": ()}
        at += f"{self.name}.act_fn."
        scalars = {at + name: size for name, size in shapes.items()}
        first = LinearSpec(up, inner, hidden_size, self.bias)
        linears = first, LinearSpec(down, hidden_size, inner, self.bias)
        return Weights(linears, scalars if self.activation == XIELU else {})

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        up, down = (f"{at}{self.name}.{leaf}" for leaf in self.leaves)
        y = ops.linear(x, up)
        is_plain = self.activation != XIELU
        y = (
            ops.activation(y, self.activation)
            if is_plain
            else ops.xielu(y, f"{at}{self.name}.act_fn")
        )
        return ops.linear_out(y, down, residual, scale)
