"""Norms, gates, activations, and whatever takes elements or rows by themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qlora_wgpu.graph.offload import Recomputation
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.columns import columns
from qlora_wgpu.ops.delta_net import short_conv
from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.ops.pointwise import (
    XIELUScalars,
    activation,
    clip,
    glu,
    row_gate,
    scaled,
    weighted_sum,
    xielu,
)
from qlora_wgpu.ops.tensor import as_float32, as_operand, cast
from qlora_wgpu.reference import delta_net as delta_net_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import ROWS, SAMPLES, each, normal, uneven
from qlora_wgpu.selfcheck.runner import Array, Runner

_Maker = Callable[[Array], Tensor]
_HELD = 250  # no more than any subgroup holds of a row, where its invocations hold one
_WIDE = 2100  # more than any subgroup holds, and than a row's threads take at once


def _types(run: Runner, rounded_first: bool) -> tuple[_Maker, _Maker]:
    """What makes the first gradient, and the second one."""
    return (run.operand, run.float32) if rounded_first else (run.float32, run.operand)


@each((True, _HELD), (False, _HELD), (True, _WIDE), (False, _WIDE))
def check_rms_norm(run: Runner, rounded_first: bool, columns: int) -> None:
    """y, and dx of two uses, each with a gradient of its own type; one adds to a residual.

    dx as an operand comes from the launch that adds to it.
    """
    x, weight = uneven("x", ROWS, columns), normal("weight", columns)
    skip, dy, dz = (normal(name, ROWS, columns) for name in ("skip", "dy", "dz"))
    tskip = (run.operand if rounded_first else run.float32)(skip, grad=True)
    tx = run.float32(x, grad=True)
    run.graph.recomputation = Recomputation(remakes=True)
    y = rms_norm(run.graph, tx, run.float32(weight), 1e-5)
    z = rms_norm(run.graph, tx, run.float32(weight), 1e-5, residual=tskip)
    again = run.graph.again(y)
    first, second = _types(run, rounded_first)
    run.graph.add_gradient(z, first(dz))
    dx, dskip = run.gradients(y, second(dy), tx, tskip)
    got_y, got_z, got_again, got_dx, got_rounded, got_skip = run.run(
        y, z, again, dx, as_operand(run.graph, dx), dskip
    )
    run.compare_exactly(got_rounded, run.rounded(got_dx))
    run.compare_exactly(got_again, got_y)
    dy, dz = (dy, run.rounded(dz)) if rounded_first else (run.rounded(dy), dz)
    x = np.asarray(x, np.float32).astype(np.float64)
    exact = norms_reference.rms_norm(x, weight, 1e-5)
    run.compare(got_y, exact, y.dtype, by_row=True)
    skip = run.rounded(skip) if rounded_first else skip
    run.compare(got_z, exact + skip, z.dtype, by_row=True)
    run.compare(got_skip, dz, dskip.dtype)
    run.compare(got_dx, grad(norms_reference.rms_norm, dy + dz, x, weight, 1e-5), by_row=True)


def check_only_norm(run: Runner) -> None:
    """RMSNorm of an operand that goes nowhere else: dx is made in its type."""
    x, weight, dy = uneven("x", ROWS, 52), normal("weight", 52), normal("dy", ROWS, 52)
    tx = run.operand(x, grad=True)
    run.graph.recomputation = Recomputation(remakes=True)
    y = rms_norm(run.graph, tx, run.float32(weight), 1e-5)
    again = run.graph.again(y)
    (dx,) = run.gradients(y, run.float32(dy), tx)
    got, got_y, got_again = run.run(dx, y, again)
    run.compare_exactly(got_again, got_y)
    exact = grad(norms_reference.rms_norm, dy, run.rounded(x), weight, 1e-5)
    run.compare(got, exact, dx.dtype, by_row=True)


@each((True, True), (False, True), (True, False), (False, False))
def check_layer_norm(run: Runner, has_bias: bool, rounded_first: bool) -> None:
    """y and dx of two uses, each with a gradient of its own type; dx as an operand, too."""
    x, weight, bias = uneven("x", ROWS, _WIDE), normal("weight", _WIDE), normal("bias", _WIDE)
    dy, dz = normal("dy", ROWS, _WIDE), normal("dz", ROWS, _WIDE)
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to be taken away
    tx = run.float32(x, grad=True)
    tbias = run.float32(bias) if has_bias else None
    y = layer_norm(run.graph, tx, run.float32(weight), tbias, 1e-5)
    z = layer_norm(run.graph, tx, run.float32(weight), tbias, 1e-5)
    first, second = _types(run, rounded_first)
    run.graph.add_gradient(z, first(dz))
    (dx,) = run.gradients(y, second(dy), tx)
    got_y, got_dx, got_rounded = run.run(y, dx, as_operand(run.graph, dx))
    run.compare_exactly(got_rounded, run.rounded(got_dx))
    dy, dz = (dy, run.rounded(dz)) if rounded_first else (run.rounded(dy), dz)
    x = np.asarray(x, np.float32).astype(np.float64)
    exact = norms_reference.layer_norm(x, weight, 1e-5, bias * has_bias)
    run.compare(got_y, exact, y.dtype, by_row=True)
    run.compare(got_dx, grad(norms_reference.layer_norm, dy + dz, x, weight, 1e-5), by_row=True)


def _slopes(name: str) -> Array:
    """Inputs of an activation: normal ones, and those from where it is flat on both sides."""
    x = 3 * normal(name, ROWS, 52)
    x[:, ::5] = np.linspace(-30, 30, x[:, ::5].size).reshape(ROWS, -1)
    return x


_ACTIVATIONS = ("gelu", "silu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")


@each(*((name, exact) for name in _ACTIVATIONS[:-1] for exact in (True, False)))
def check_glu(run: Runner, name: str, exact_gradient: bool) -> None:
    """SwiGLU and GeGLU with their gradients, given one of each type."""
    gate, up, dy = _slopes("gate"), normal("up", ROWS, 52), normal("dy", ROWS, 52)
    tensors = [run.operand(gate, grad=True), run.operand(up, grad=True)]
    y = glu(run.graph, tensors[0], tensors[1], name)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    gradients = run.gradients(y, cotangent, *tensors)
    got = run.run(y, *gradients)
    dy = dy if exact_gradient else run.rounded(dy)
    gate, up = run.rounded(gate), run.rounded(up)
    run.compare(got[0], pointwise_reference.glu(gate, up, name), y.dtype)
    expected = grads(pointwise_reference.glu, dy, gate, up, name, of=2)
    for value, exact, gradient in zip(got[1:], expected, gradients, strict=True):
        run.compare(value, exact, gradient.dtype)


@each(*((name, exact) for name in _ACTIVATIONS for exact in (True, False)))
def check_activation(run: Runner, name: str, exact_gradient: bool) -> None:
    """y and dx, with a gradient of each type."""
    x, dy = _slopes("x"), normal("dy", ROWS, 52)
    tx = run.operand(x, grad=True)
    y = activation(run.graph, tx, name)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    (dx,) = run.gradients(y, cotangent, tx)
    got_y, got_dx = run.run(y, dx)
    x = run.rounded(x)
    dy = dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, pointwise_reference.activation(x, name), y.dtype)
    run.compare(got_dx, grad(pointwise_reference.activation, dy, x, name), dx.dtype)


@each((True,), (False,))
def check_clip(run: Runner, exact_gradient: bool) -> None:
    """y and dx, with a gradient of each type; the limit is a number of either type."""
    x, dy = normal("x", ROWS, 52), normal("dy", ROWS, 52)
    tx = run.operand(x, grad=True)
    y = clip(run.graph, tx, 0.75)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    (dx,) = run.gradients(y, cotangent, tx)
    got_y, got_dx = run.run(y, dx)
    x = run.rounded(x)
    dy = dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, pointwise_reference.clip(x, 0.75), y.dtype)
    run.compare(got_dx, grad(pointwise_reference.clip, dy, x, 0.75), dx.dtype)


@each((True,), (False,))
def check_xielu(run: Runner, exact_gradient: bool) -> None:
    """y and dx, with a gradient of each type; ε is large, so that it shows."""
    x, dy, scalars = _slopes("x"), normal("dy", ROWS, 52), (0.7, -0.4, 0.45, -0.03)
    x[:, 1::5] = np.linspace(-1.5, 0.1, x[:, 1::5].size).reshape(ROWS, -1)
    tx = run.operand(x, grad=True)
    y = xielu(run.graph, tx, XIELUScalars(*(run.float32(np.array([s])) for s in scalars)))
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    (dx,) = run.gradients(y, cotangent, tx)
    got_y, got_dx = run.run(y, dx)
    x, dy = run.rounded(x), dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, pointwise_reference.xielu(x, scalars), y.dtype)
    run.compare(got_dx, grad(pointwise_reference.xielu, dy, x, scalars), dx.dtype)


def check_xielu_near_zero(run: Runner) -> None:
    """Where exp(x) - 1 - x is of the size of x², row by row, without the slope that hides it."""
    scalars = (0.7, 30.0, 0.0, -1e-6)
    x = -np.geomspace(1e-4, 1.0, ROWS)[:, None] * np.linspace(0.5, 1.0, 16)
    tx = run.operand(x, grad=True)
    y = xielu(run.graph, tx, XIELUScalars(*(run.float32(np.array([s])) for s in scalars)))
    got_y, got_dx = run.run(y, *run.gradients(y, run.float32(np.ones_like(x)), tx))
    x = run.rounded(x)
    run.compare(got_y, pointwise_reference.xielu(x, scalars), y.dtype, by_row=True)
    run.compare(got_dx, grad(pointwise_reference.xielu, 1.0, x, scalars), y.dtype, by_row=True)


@each((True,), (False,))
def check_scaling(run: Runner, exact_gradient: bool) -> None:
    """A matrix of each type times a stored number, and a sum; with gradients of each type."""
    x, z, dy = (normal(name, ROWS, 52) for name in ("x", "z", "dy"))
    make, other = _types(run, exact_gradient)
    tx, tz = run.float32(x, grad=True), run.operand(x, grad=True)
    y = scaled(run.graph, tx, run.float32(np.array([-0.37])))
    (dx,) = run.gradients(y, other(dy), tx)
    total = weighted_sum(run.graph, tz, make(z), 0.7, -3.0)
    outputs = [y, total, dx, *run.gradients(total, other(dy), tz)]
    got = run.run(*outputs)
    z, dy = (run.rounded(z), dy) if exact_gradient else (z, run.rounded(dy))
    exact = [
        pointwise_reference.scaled(np.asarray(x, np.float32), float(np.float32(-0.37))),
        pointwise_reference.weighted_sum(run.rounded(x), z, 0.7, -3.0),
        pointwise_reference.scaled(dy, float(np.float32(-0.37))),
        pointwise_reference.scaled(dy, 0.7),
    ]
    for found, expected, tensor in zip(got, exact, outputs, strict=True):
        run.compare(found, expected, tensor.dtype)


@each((True, True), (False, True), (True, False), (False, False))
def check_short_conv(run: Runner, has_bias: bool, exact_gradient: bool) -> None:
    """y and dx of samples in two rows, with a gradient of each type."""
    segments, hidden, taps = SAMPLES, 24, 4
    x, dy = normal("x", segments.size, 3 * hidden), normal("dy", segments.size, hidden)
    weight, bias = normal("weight", hidden, taps), normal("bias", hidden)
    tx, given = run.operand(x, grad=True), run.float32(bias) if has_bias else None
    batch = run.batch(segments)
    y = short_conv(run.graph, tx, run.float32(weight), given, batch)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    got_y, got_dx = run.run(y, *run.gradients(y, cotangent, tx))
    x, dy = run.rounded(x), dy if exact_gradient else run.rounded(dy)
    bias = bias * has_bias
    run.compare(got_y, delta_net_reference.short_conv(x, weight, bias, segments), y.dtype)
    run.compare(
        got_dx, grad(delta_net_reference.short_conv, dy, x, weight, bias, segments), y.dtype
    )


@each((True,), (False,))
def check_row_gate(run: Runner, rounded_first: bool) -> None:
    """y, and the gradients of x, of its gate and of what it is added to."""
    x, dy, skip = (normal(name, ROWS, _WIDE) for name in ("x", "dy", "skip"))
    gate = 4.0 * normal("gate", ROWS, 1)
    make = _types(run, rounded_first)[0]
    tx, tgate, tskip = make(x), run.float32(gate, grad=True), run.float32(skip)
    tx.requires_grad = True
    y = row_gate(run.graph, tx, tgate, None if rounded_first else tskip)
    given = make(dy)
    got_y, got_dx, got_gate = run.run(y, *run.gradients(y, given, tx, tgate))
    if rounded_first:
        x, dy = run.rounded(x), run.rounded(dy)
    dx, dgate = grads(pointwise_reference.row_gate, dy, x, gate, of=2)
    expected = pointwise_reference.row_gate(x, gate) + (0.0 if rounded_first else skip)
    run.compare(got_y, expected)
    run.compare(got_dx, dx, run.dtype if rounded_first else "float32")
    run.compare(got_gate, dgate, inner=2e-6)


@each((True,), (False,))
def check_columns(run: Runner, rounded_first: bool) -> None:
    """Slices that overlap, and the sum of their gradients."""
    x, dys = normal("x", ROWS, 45), [normal("dy", ROWS, 14), normal("dz", ROWS, 21)]
    tx = run.operand(x, grad=True)
    slices = [columns(run.graph, tx, 3, 14), columns(run.graph, tx, 9, 21)]
    first, second = _types(run, rounded_first)
    run.graph.add_gradient(slices[0], first(dys[0]))
    (dx,) = run.gradients(slices[1], second(dys[1]), tx)
    *got, got_dx = run.run(*slices, dx)
    rounded = 0 if rounded_first else 1
    dys[rounded] = run.rounded(dys[rounded])
    exact = np.zeros_like(x)
    exact[:, 3:17] += dys[0]
    exact[:, 9:30] += dys[1]
    run.compare_exactly(got[0], run.rounded(x)[:, 3:17])
    run.compare_exactly(got[1], run.rounded(x)[:, 9:30])
    run.compare(got_dx, exact)


def check_types(run: Runner) -> None:
    """Copies in another type, and gradients of both types added up."""
    x, dys = normal("x", ROWS, 45), [normal(name, ROWS, 45) for name in ("dy", "dz", "dw", "dv")]
    tx = run.float32(x, grad=True)
    y = cast(run.graph, tx)
    z = as_float32(run.graph, y)
    copies = [z, *(cast(run.graph, tx) for _ in dys[1:])]
    for index, (tensor, dy) in enumerate(zip(copies, dys, strict=True)):
        run.graph.add_gradient(tensor, (run.float32, run.operand)[index % 2](dy))
    run.graph.backward()
    got_dx, *got_z = run.run(run.graph.gradient_of(tx), *([z] if z is not tx else []))
    for got in got_z:
        run.compare_exactly(got, run.rounded(x))
    exact = [(run.rounded(dy) if index % 2 else dy) for index, dy in enumerate(dys)]
    run.compare(got_dx, np.sum(exact, axis=0))


def check_rounding(run: Runner) -> None:
    """Every bit of what is rounded: ties to both sides, infinities and NaN."""
    high = np.arange(0x3F70, 0x3F90, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = np.concatenate([(high | low).ravel(), (high | low).ravel() | 0x80000000])
    special = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    x = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)[None]
    y = cast(run.graph, run.float32(x.astype(np.float64)))
    (got,) = run.run(as_float32(run.graph, y))
    run.compare_exactly(got, run.rounded(x.astype(np.float64)))
