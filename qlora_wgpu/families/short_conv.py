"""A gated short convolution in place of a layer's attention, and how it is traced."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.dimensions import Dimensions
from qlora_wgpu.families.family import LinearSpec, NormSize, Weights
from qlora_wgpu.families.layers import LayerOps
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class ShortConv:
    """out_proj(C · conv(B · v)), with B, C and v of in_proj(x).

    Attributes:
        dimensions: The decoder's dimensions.
        taps: How many tokens the convolution sees, the own one included.
        bias: Whether the convolution and both projections have biases.
    """

    dimensions: Dimensions
    taps: int
    bias: bool = False

    def weights(self, at: str) -> Weights:
        """The projections and the convolution of the layer whose names begin so."""
        at, size = f"{at}conv.", self.dimensions.hidden_size
        in_proj = LinearSpec(f"{at}in_proj", 3 * size, size, self.bias)
        out_proj = LinearSpec(f"{at}out_proj", size, size, self.bias)
        frozen: dict[str, NormSize] = {f"{at}conv.weight": (size, 1, self.taps)}
        if self.bias:
            frozen[f"{at}conv.bias"] = size
        return Weights((in_proj, out_proj), frozen)

    def trace(
        self, ops: LayerOps, x: Tensor, at: str, residual: Tensor | None, scale: float
    ) -> Tensor:
        """Applies it to x; see ``LayerOps.linear_out`` for what becomes of the result."""
        y = ops.short_conv(ops.linear(x, f"{at}conv.in_proj"), f"{at}conv.conv")
        return ops.linear_out(y, f"{at}conv.out_proj", residual, scale)
