"""Norms, gates, activations, and whatever takes elements or rows by themselves."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.ops.activation import activation
from qlora_wgpu.ops.columns import columns
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.ops.layer_norm import layer_norm
from qlora_wgpu.ops.rms_norm import rms_norm
from qlora_wgpu.ops.tensor import as_float32, cast
from qlora_wgpu.reference import activation as activation_reference
from qlora_wgpu.reference import glu as glu_reference
from qlora_wgpu.reference import layer_norm as layer_norm_reference
from qlora_wgpu.reference import rms_norm as rms_norm_reference
from qlora_wgpu.selfcheck.cases.common import ROWS, normal
from qlora_wgpu.selfcheck.runner import Runner


def check_rms_norm(run: Runner) -> None:
    """y and dx, which is added to the residual's gradient."""
    x, dy, weight = normal("x", ROWS, 130), normal("dy", ROWS, 130), normal("weight", 130)
    skip = normal("skip", ROWS, 130)
    tx, tskip = run.float32(x, grad=True), run.float32(skip, grad=True)
    y = rms_norm(run.graph, tx, run.float32(weight), 1e-5)
    z = rms_norm(run.graph, tx, run.float32(weight), 1e-5, residual=tskip)
    run.graph.add_gradient(z, run.float32(dy))
    dx, dskip = run.gradients(y, run.operand(dy), tx, tskip)
    got_y, got_z, got_dx, got_skip = run.run(y, z, dx, dskip)
    exact = rms_norm_reference.forward(x, weight, 1e-5)
    run.compare(got_y, exact)
    run.compare(got_z, exact + skip)
    run.compare(got_skip, dy)
    run.compare(got_dx, rms_norm_reference.backward(dy + run.rounded(dy), x, weight, 1e-5))


def check_layer_norm(run: Runner) -> None:
    """y and dx."""
    x, dy = normal("x", ROWS, 130), normal("dy", ROWS, 130)
    weight, bias = normal("weight", 130), normal("bias", 130)
    tx = run.float32(x, grad=True)
    y = layer_norm(run.graph, tx, run.float32(weight), run.float32(bias), 1e-5)
    got_y, got_dx = run.run(y, *run.gradients(y, run.float32(dy), tx))
    run.compare(got_y, layer_norm_reference.forward(x, weight, bias, 1e-5))
    run.compare(got_dx, layer_norm_reference.backward(dy, x, weight, 1e-5))


def check_glu(run: Runner) -> None:
    """SwiGLU and GeGLU with their gradients."""
    for name in ("silu", "gelu_pytorch_tanh", "gelu"):
        gate, up, dy = (normal(n, ROWS, 52) for n in ("gate", "up", "dy"))
        tensors = [run.operand(3 * gate, grad=True), run.operand(up, grad=True)]
        y = glu(run.graph, tensors[0], tensors[1], name)
        got = run.run(y, *run.gradients(y, run.float32(dy), *tensors))
        gate, up = run.rounded(3 * gate), run.rounded(up)
        run.compare(got[0], glu_reference.forward(gate, up, name))
        expected = glu_reference.backward(dy, gate, up, name)
        for gradient, exact in zip(got[1:], expected, strict=True):
            run.compare(gradient, exact)


def check_activation(run: Runner) -> None:
    """y and dx, with a gradient of each type."""
    for dtype in ("float32", run.dtype):
        x, dy = 3 * normal("x", ROWS, 52), normal("dy", ROWS, 52)
        tx = run.operand(x, grad=True)
        y = activation(run.graph, tx, "gelu")
        cotangent = run.float32(dy) if dtype == "float32" else run.operand(dy)
        got_y, got_dx = run.run(y, *run.gradients(y, cotangent, tx))
        x = run.rounded(x)
        dy = dy if dtype == "float32" else run.rounded(dy)
        run.compare(got_y, activation_reference.forward(x, "gelu"))
        run.compare(got_dx, dy * activation_reference.slope(x, "gelu"))


def check_columns(run: Runner) -> None:
    """Slices that overlap, and the sum of their gradients."""
    x, dys = normal("x", ROWS, 45), (normal("dy", ROWS, 14), normal("dz", ROWS, 21))
    tx = run.operand(x, grad=True)
    slices = [columns(run.graph, tx, 3, 14), columns(run.graph, tx, 9, 21)]
    run.graph.add_gradient(slices[0], run.float32(dys[0]))
    (dx,) = run.gradients(slices[1], run.operand(dys[1]), tx)
    *got, got_dx = run.run(*slices, dx)
    exact = np.zeros_like(x)
    exact[:, 3:17] += dys[0]
    exact[:, 9:30] += run.rounded(dys[1])
    run.compare(got[0], run.rounded(x)[:, 3:17])
    run.compare(got[1], run.rounded(x)[:, 9:30])
    run.compare(got_dx, exact)


def check_types(run: Runner) -> None:
    """Copies in another type, and gradients of both types added up."""
    x, dys = normal("x", ROWS, 45), (normal("dy", ROWS, 45), normal("dz", ROWS, 45))
    tx = run.float32(x, grad=True)
    y = cast(run.graph, tx)
    z = as_float32(run.graph, y)
    w = cast(run.graph, tx)
    for tensor, dy in ((z, dys[0]), (w, dys[1])):
        run.graph.add_gradient(tensor, run.operand(dy))
    run.graph.backward()
    got_dx, *got_z = run.run(run.graph.gradient_of(tx), *([z] if z is not tx else []))
    for got in got_z:
        run.compare(got, run.rounded(x))
    run.compare(got_dx, run.rounded(dys[0]) + run.rounded(dys[1]))
