"""Linear layers of one input as one product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.graph.tensor import Storage, Tensor, round_up, vector
from qlora_wgpu.model.quantized_weights import quantized_matrix
from qlora_wgpu.ops.linear import linear_group, most_layers
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import (
    ROWS,
    each,
    filled_adapter,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.runner import Array, Runner


@each(
    ((136, 24, 40), 72, 8, 0, False),
    ((144, 136), 72, 16, 1, False),
    ((144, 136), 72, 16, 2, False),
    ((8, 16), 64, 8, 2, True),
    ((8, 16, 24), 64, 8, 0, True),
    ((24, 8, 40), 136, 0, 0, False),
    ((1024, 72, 8), 128, 24, 0, False),
    ((136, 24, 40), 72, 8, 0, True),
    ((40, 8, 24), 24, 8, 0, False, 690),
    ((40, 24), 24, 16, 0, False, 150),
)
def check_linear_group(
    run: Runner,
    outer: tuple[int, ...],
    inner: int,
    r: int,
    float32: int,
    has_bias: bool,
    rows: int = ROWS,
) -> None:
    """Layers of one input: every y, the sum of dx, and the gradients of all A and B.

    Args:
        run: Where it runs.
        outer: Columns of the results.
        inner: Columns of the input.
        r: The rank of each adapter; 0 for none.
        float32: How many results are float32.
        has_bias: Whether there are biases.
        rows: Rows of the input; with many a workgroup makes more of the adapters' thin products.
    """
    g = run.graph
    g.profile = replace(g.profile, fused_linears=True)
    outer = outer[: most_layers(g, with_bias=has_bias, with_lora=r > 0)]
    names = [f"model.layers.0.{name}_proj" for name in "qkv"[: len(outer)]]
    specs = [LinearSpec(n, columns, inner) for n, columns in zip(names, outer, strict=True)]
    adapter, parts = filled_adapter(LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1)), specs)
    layers, weights = [], []
    for index, spec in enumerate(specs):
        stored = quantize_nf4(
            normal(f"w of {spec.name}", spec.out_features, inner).astype(np.float32), 64, index != 1
        )
        lora = adapter.loras[spec.name] if r else None
        weight = quantized_matrix(spec.name, stored, textures=g.profile.textures)
        layers.append(Linear(spec.name, weight, None, lora))
        weights.append(run.rounded_weight(stored.dequantize().astype(np.float64)))
    biases = [normal(f"bias of {name}", n) * has_bias for name, n in zip(names, outer, strict=True)]
    if has_bias:
        tensors = in_one_storage(biases)
        pairs = zip(layers, tensors, strict=True)
        layers = [replace(layer, bias=bias) for layer, bias in pairs]
    x, batch = normal("x", rows, inner), run.batch(np.ones((1, rows), np.int64))
    tx = run.operand(x, grad=True)
    flags = [index < float32 for index in range(len(outer))]
    ys = linear_group(g, tx, layers, batch, flags)
    dys = [normal(f"dy of {name}", rows, y.columns) for name, y in zip(names, ys, strict=True)]
    for y, dy in zip(ys, dys, strict=True):
        g.add_gradient(y, run.float32(dy))
    g.backward()
    flat = [whole_gradient(adapter)] if r else []
    gradient = g.gradient_of(tx)
    got_x, *got = run.run(gradient, *ys, *flat)
    x, total = run.rounded(x), np.zeros_like(x)
    gradients: dict[str, Array] = {}
    for index, (name, w, dy) in enumerate(zip(names, weights, dys, strict=True)):
        own = [n for n in parts if name in n]
        a, b = (parts[n] * (r > 0) for n in own)
        mask = np.ones_like(x)
        exact = linear_reference.linear(x, w, a, b, 2.0, mask, biases[index])
        run.compare(got[index], exact, ys[index].dtype)
        dx, da, db = grads(
            linear_reference.linear, run.rounded(dy), x, w, a, b, 2.0, mask, of=(0, 2, 3)
        )
        total += dx
        gradients |= dict(zip(own, (da, db), strict=True))
    run.compare(got_x, total, gradient.dtype)
    if r:
        run.compare(got[-1], joined(adapter, gradients))


def in_one_storage(arrays: list[Array]) -> list[Tensor]:
    """Vectors, each where a binding may begin."""
    begins = np.cumsum([0, *(round_up(len(array), ALIGNMENT // 4) for array in arrays)])
    data = np.zeros(begins[-1], np.float32)
    storage = Storage("biases", "check", data.nbytes, data)
    tensors = []
    for array, begin in zip(arrays, begins.tolist(), strict=False):
        data[begin : begin + len(array)] = array
        tensors.append(vector("bias", len(array), "float32", storage, 4 * begin))
    return tensors
