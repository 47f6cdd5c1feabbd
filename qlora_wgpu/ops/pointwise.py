"""Pointwise ops: ``KERNEL/forward.wgsl`` computes y, ``backward.wgsl`` the gradients.

Each is one launch. Both bind the same names; the gradient of x is dx.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.common import DropoutMask, dropout_params, row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers

_KINDS = ("SILU", "ERF", "RELU", "SQUARED_RELU", "SIGMOID", "QUICK_GELU")


def _kind(name: str = "") -> dict[str, Constant]:
    return {kind: kind == name for kind in _KINDS}


SIGMOID = _kind("SIGMOID")
"""The activation of gates, which no MLP has."""
ACTIVATIONS = {
    "silu": _kind("SILU"),
    "swish": _kind("SILU"),
    "gelu_pytorch_tanh": _kind(),
    "gelu_new": _kind(),
    "gelu_fast": _kind(),
    "gelu": _kind("ERF"),
    "quick_gelu": _kind("QUICK_GELU"),
    "relu": _kind("RELU"),
    "relu2": _kind("SQUARED_RELU"),
}
"""Activation functions, by Hugging Face's names."""


def pointwise(
    g: Graph,
    kernel: str,
    name: str,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, int | float] | None = None,
    constants: Mapping[str, Constant] | None = None,
    frozen: Mapping[str, Tensor | None] | None = None,
    *,
    work: int = 0,
    suited: bool = False,
    remade: bool = True,
) -> Tensor:
    """y = kernel(inputs, frozen), of the first input's shape, as an operand.

    ``inputs`` get gradients, of the types of ``Graph.new_gradient`` if ``suited``, else operands;
    ``params`` are those other than tensor sizes; there are ``work`` invocations, by default x's
    units; ``remade`` is whether y may be rematerialized.
    """
    x = next(iter(inputs.values()))
    if any(other.shape != x.shape for other in inputs.values()):
        raise GraphError(f"{kernel}: {', '.join(map(str, inputs.values()))} differ")
    work = work or x.rows * x.units(8)
    given = {**inputs, **(frozen or {})}

    def forward() -> Tensor:
        y = g.operand(name, x.rows, x.columns)
        g.launch(f"{kernel}/forward.wgsl", work, {**given, "y": y}, params, constants)
        return y

    def vjp(dy: Tensor) -> None:
        own = {key: tensor for key, tensor in given.items() if key != "bias"}
        gradients = {
            key: g.new_gradient(each) if suited else g.operand(f"d {each.name}", *each.shape)
            for key, each in inputs.items()
        }
        bound = {**own, "dy": dy, **{f"d{key}": tensor for key, tensor in gradients.items()}}
        g.launch(f"{kernel}/backward.wgsl", work, bound, params, constants)
        for key, each in inputs.items():
            g.add_gradient(each, gradients[key])

    y = forward()
    g.record(y, list(inputs.values()), vjp, remat=forward if remade else None)
    return y


def activation(g: Graph, x: Tensor, name: str) -> Tensor:
    """y = name(x), a key of ``ACTIVATIONS``; x (rows, columns) operand."""
    return pointwise(g, "activation", name, {"x": x}, constants=ACTIVATIONS[name])


def clip(g: Graph, x: Tensor, limit: float) -> Tensor:
    """y = clamp(x, -limit, limit), whose gradient is zero beyond the limit."""
    return pointwise(g, "clip", "clipped", {"x": x}, {"limit": limit})


def glu(g: Graph, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """y = activation(gate) · up (Shazeer, 2020); both (rows, columns) operands."""
    return _gated(g, gate, up, ACTIVATIONS[activation])


def sigmoid_gate(g: Graph, x: Tensor, gate: Tensor) -> Tensor:
    """y = sigmoid(gate) · x, as in Qwen3-Next's attention output."""
    return _gated(g, gate, x, SIGMOID)


def _gated(g: Graph, gate: Tensor, up: Tensor, kind: dict[str, Constant]) -> Tensor:
    return pointwise(g, "glu", "glu", {"gate": gate, "up": up}, constants=kind)


def tanh(g: Graph, x: Tensor) -> Tensor:
    """The hyperbolic tangent of x, which is of any type, as an operand."""
    return pointwise(g, "tanh", "tanh", {"x": x}, suited=True)


def sparse_glu(g: Graph, gate: Tensor, up: Tensor, activation: str, deviations: float) -> Tensor:
    """y = activation(max(gate - cut, 0)) · up, with cut = mean + deviations · std over each row.

    If the elements of a row of the gate are normally distributed, that keeps a known share of them
    (Gemma 3n). Gate and up are (rows, columns) operands.
    """
    if gate.shape != up.shape:
        raise GraphError(f"sparse_glu: {gate} and {up} differ")
    given, params = {"gate": gate, "up": up}, {"deviations": deviations}
    workgroups, constants = row_workgroups(g, gate.rows), ACTIVATIONS[activation] | row_constants(g)

    def forward() -> Tensor:
        y = g.operand("glu", *gate.shape)
        g.launch("sparse_glu/forward.wgsl", workgroups, {**given, "y": y}, params, constants)
        return y

    def vjp(dy: Tensor) -> None:
        made = [g.operand(f"d {each.name}", *each.shape) for each in (gate, up)]
        bound = {**given, "dy": dy, "dgate": made[0], "dup": made[1]}
        g.launch("sparse_glu/backward.wgsl", workgroups, bound, params, constants)
        for each, gradient in zip((gate, up), made, strict=True):
            g.add_gradient(each, gradient)

    y = forward()
    g.record(y, [gate, up], vjp, remat=forward)
    return y


@dataclass(frozen=True)
class ClampedGLU:
    """The scalars of gpt-oss's gated unit, by config.json's names."""

    swiglu_limit: float = 7.0  # the maximum of gate, and of up's magnitude
    swiglu_alpha: float = 1.702  # the factor of the gate within the sigmoid


def clamped_glu(g: Graph, gate: Tensor, up: Tensor, scalars: ClampedGLU) -> Tensor:
    """y = (clamp(up, -limit, limit) + 1) · x · σ(alpha · x) with x = min(gate, limit)."""
    alpha, limit = scalars.swiglu_alpha, scalars.swiglu_limit
    params = {"alpha": alpha, "limit": limit}
    return pointwise(g, "clamped_glu", "glu", {"gate": gate, "up": up}, params)


def qk_norm(g: Graph, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head of x (rows, heads · head_dim); weight (head_dim) float32."""
    heads, params = _heads(x, weight, eps, "qk_norm")
    frozen = {"weight": weight}
    return pointwise(
        g, "qk_norm", f"norm({x.name})", {"x": x}, params, None, frozen, work=x.rows * heads
    )


def qk_layer_norm(
    g: Graph, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> Tensor:
    """LayerNorm of each head; weight, bias (heads, head_dim), or (1, head_dim) for all heads."""
    heads, params = _heads(x, weight, eps, "qk_layer_norm")
    if weight.rows not in (1, heads) or (bias is not None and bias.shape != weight.shape):
        raise GraphError(f"qk_layer_norm: {x} has no heads of {weight}, or of {bias}")
    params["weight_stride"] = weight.units(2) if weight.rows > 1 else 0
    frozen = {"weight": weight, "bias": bias}
    return pointwise(
        g, "qk_layer_norm", f"norm({x.name})", {"x": x}, params, None, frozen, work=x.rows * heads
    )


def _heads(x: Tensor, weight: Tensor, eps: float, name: str) -> tuple[int, dict[str, int | float]]:
    head_dim = weight.columns
    if head_dim % 2 or x.columns % head_dim:
        raise GraphError(f"{name}: {x} has no heads of {weight}")
    heads = x.columns // head_dim
    return heads, {
        "heads": heads, "head_dim": head_dim // 2, "eps": eps,
    }  # fmt: skip


def gated_rms_norm(g: Graph, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = RMSNorm of each head of x · silu(z); weight (head_dim), head_dim a multiple of 8.

    In float32 throughout: transformers rounds the norm to the operands' type before the gate.
    """
    head_dim = weight.columns
    if head_dim % 8 or x.columns % head_dim:
        raise GraphError(f"gated_rms_norm: {x} and {z} have no heads of {weight}")
    heads = x.rows * x.columns // head_dim
    params = {"heads": heads, "units": head_dim // 8, "eps": eps}
    return pointwise(
        g, "gated_rms_norm", f"norm({x.name})", {"x": x, "z": z}, params, ACTIVATIONS["silu"],
        {"weight": weight}, work=heads, suited=True,
    )  # fmt: skip


@dataclass(frozen=True)
class XIELUScalars:
    """The stored parameters of one xIELU; float32, one element each."""

    alpha_p: Tensor  # its softplus is the curvature of the positive side
    alpha_n: Tensor  # its softplus, plus β, is the curvature of the negative side
    beta: Tensor  # the slope at zero
    eps: Tensor  # slightly below zero: the negative side is not computed closer to zero


def xielu(g: Graph, x: Tensor, scalars: XIELUScalars) -> Tensor:
    """y = softplus(alpha_p) · x² + β · x for x > 0, else as below.

    n · (exp(min(x, eps)) - 1 - x) + β · x, with n = β + softplus(alpha_n); x and y operands.
    """
    stored = {field.name: getattr(scalars, field.name) for field in fields(scalars)}
    for name, scalar in stored.items():
        if scalar.shape != (1, 1):
            raise GraphError(f"xielu: {name} must be one number, got {scalar}")
    return pointwise(g, "xielu", "xielu", {"x": x}, frozen=stored, remade=False)


def row_gate(g: Graph, x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    """y = sigmoid(gate) · x (+ residual), float32; gate (rows, 1) float32."""
    fits = gate.shape == (x.rows, 1) and gate.dtype == "float32"
    if not fits or (residual is not None and residual.shape != x.shape):
        raise GraphError(f"row_gate: {x}, {gate} and {residual} do not fit")
    y = g.float32(f"gated {x.name}", x.rows, x.columns)
    units = x.rows * x.units(8)
    tensors = {"x": x, "gate": gate, "y": y, "residual": residual}
    g.launch("row_gate/forward.wgsl", units, tensors)

    def vjp(dy: Tensor) -> None:
        dx, dgate = g.new_gradient(x), g.float32(f"d {gate.name}", gate.rows, 1)
        g.launch(
            "row_gate/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": dy, "x": x, "gate": gate, "dx": dx, "dgate": dgate},
            constants=row_constants(g),
        )
        g.add_gradient(x, dx)
        g.add_gradient(gate, dgate)
        if residual is not None:
            g.add_gradient(residual, dy)

    g.record(y, [x, gate] if residual is None else [x, gate, residual], vjp)
    return y


def scaled(g: Graph, x: Tensor, scalar: Tensor) -> Tensor:
    """y = scalar · x, of x's type; the scalar is one number, float32, frozen."""
    if scalar.shape != (1, 1):
        raise GraphError(f"scaled: the scalar must be one number, got {scalar}")
    y = matrix(f"scaled {x.name}", x.rows, x.columns, x.dtype)
    return _linear(g, "tensor/scale.wgsl", x, y, {"scalar": scalar})


def weighted_sum(g: Graph, x: Tensor, z: Tensor, a: float, b: float) -> Tensor:
    """y = a · x + b · z, an operand; z gets no gradient."""
    if x.shape != z.shape:
        raise GraphError(f"weighted_sum: {x} and {z} differ")
    y = g.operand(f"{x.name} + {z.name}", x.rows, x.columns)
    return _linear(g, "tensor/weighted_sum.wgsl", x, y, {}, {"z": z}, {"a": a, "b": b})


def scaled_sum(g: Graph, x: Tensor, z: Tensor, factor: float) -> Tensor:
    """y = factor · (x + z), float32; both of any type."""
    if x.shape != z.shape:
        raise GraphError(f"scaled_sum: {x} and {z} differ")
    y = g.float32(f"{x.name} + {z.name}", x.rows, x.columns)
    path, units = "tensor/weighted_sum.wgsl", x.rows * x.units(8)
    g.launch(path, units, {"x": x, "z": z, "y": y}, {"a": factor, "b": factor})

    def vjp(dy: Tensor) -> None:
        both = g.float32(f"d {x.name}", x.rows, x.columns)
        g.launch(path, units, {"x": dy, "y": both}, {"a": factor, "b": 0.0})
        g.add_gradient(x, both)
        g.add_gradient(z, both)

    g.record(y, [x, z], vjp)
    return y


def _linear(
    g: Graph,
    path: str,
    x: Tensor,
    y: Tensor,
    frozen: Mapping[str, Tensor],
    added: Mapping[str, Tensor] | None = None,
    params: Mapping[str, int | float] | None = None,
) -> Tensor:
    """Computes y by a linear kernel that also computes the gradient, without ``added``."""
    units = x.rows * x.units(8)
    g.launch(path, units, {"x": x, **frozen, **(added or {}), "y": y}, params)

    def vjp(dy: Tensor) -> None:
        dx = g.new_gradient(x)
        g.launch(path, units, {"x": dy, **frozen, "y": dx}, params)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y


def masked(
    g: Graph, x: Tensor, mask: DropoutMask, batch: BatchBuffers, dtype: str, *, rest: bool = False
) -> Tensor:
    """mask ⊙ x, or the dropped rest of x, in an element type; not differentiable."""
    y = matrix(f"dropout({x.name})", x.rows, x.columns, dtype)
    tensors, units = {"x": x, "batch_info": batch.info, "y": y}, x.rows * x.units(8)
    g.launch("dropout/part.wgsl", units, tensors, dropout_params(mask), {"REST": rest})
    return y


def dropout_parts(
    g: Graph, x: Tensor, mask: DropoutMask, batch: BatchBuffers
) -> tuple[Tensor, Tensor]:
    """The kept and the dropped part of x as operands; without dropout everything is kept."""

    def vjp(gradients: list[Tensor | None]) -> None:
        dkept, drest = gradients
        assert dkept is not None and drest is not None
        dx = g.new_gradient(x)
        tensors = {"dkept": dkept, "batch_info": batch.info, "drest": drest, "dx": dx}
        g.launch("dropout/backward.wgsl", x.rows * x.units(8), tensors, dropout_params(mask))
        g.add_gradient(x, dx)

    kept, rest = (masked(g, x, mask, batch, g.dtype, rest=rest) for rest in (False, True))
    g.record_jointly([kept, rest], [x], vjp)
    g.set_remat_rule(kept, partial(masked, g, x, mask, batch, g.dtype))
    return kept, rest
