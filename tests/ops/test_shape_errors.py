"""Shapes that do not fit are told when the graph is traced, with the op and both shapes."""

import pytest

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import matrix, vector
from qlora_wgpu.ops.altup import altup_correct, altup_predict, rms_match, stacked, unstacked
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import ImageLayout, make_batch_buffers
from qlora_wgpu.ops.columns import HeadPart, column_scale, columns, group_columns, head_parts
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_gates, gated_delta_rule, short_conv
from qlora_wgpu.ops.experts import expert_linear, with_factors
from qlora_wgpu.ops.image_features import add_features
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.mamba import gated_group_norm, mamba_scan, mamba_steps
from qlora_wgpu.ops.modules import DenseExperts, DenseMatrix, ExpertLinear, Head, Linear
from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.ops.pointwise import (
    ClampedGLU,
    XIELUScalars,
    clamped_glu,
    gated_rms_norm,
    glu,
    qk_layer_norm,
    qk_norm,
    row_gate,
    scaled,
    scaled_sum,
    sigmoid_gate,
    sparse_glu,
    weighted_sum,
    xielu,
)
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.ops.routing import Scoring, combine, permute, route, route_by_scores

BATCH = make_batch_buffers(1, 6)
IMAGES = make_batch_buffers(1, 6, images=ImageLayout(0), image_rows=6)


def operand(rows, size, dtype="bfloat16"):
    return matrix(f"x{rows}x{size}", rows, size, dtype)


def weight(rows, size):
    return DenseMatrix(rows, size, ((0, matrix("w", rows, size, "bfloat16")),))


def norm(size):
    return vector("weight", size, "float32")


def routing(g):
    return route(g, operand(6, 4, "float32"), 2, normalized=True)


def experts(g, x):
    where = routing(g)
    layer = ExpertLinear("up", DenseExperts(4, 8, 24, ()), None)
    return expert_linear(g, permute(g, x, where), layer, where, BATCH)


def delta_rule(g, keys, values, heads=(2, 4), key_dim=8):
    q, v, gates = operand(6, keys), operand(6, values), operand(6, heads[1], "float32")
    return gated_delta_rule(g, q, q, v, gates, gates, BATCH, *heads, key_dim, 8)


def scan(g, inner, groups, heads=2, state_size=8):
    x, bc, dt = operand(6, inner), operand(6, groups), operand(6, 2, "float32")
    return mamba_scan(g, x, bc, dt, norm(2), norm(2), BATCH, heads, state_size)


WRONG = {
    "route": (
        lambda g: route(g, operand(6, 4, "float32"), 5, normalized=True), r"route: 5.*6x4",
    ),
    "groups": (
        lambda g: route_by_scores(
            g, operand(6, 4, "float32"), None, 2, Scoring(True, True, groups=3, top_groups=1)
        ),
        r"route_by_scores: 2.*6x4.*groups=3",
    ),
    "experts": (lambda g: experts(g, operand(6, 20)), r"expert_linear.*x20.*4x8x24"),
    "combine": (
        lambda g: combine(g, operand(6, 20), routing(g), operand(6, 24, "float32")),
        r"combine.*6x24.*6x20",
    ),
    "head_parts": (
        lambda g: head_parts(g, [HeadPart(operand(6, 20), 8, 0, 4)], 3, 8), r"head_parts.*6x20.*3 ",
    ),
    "row_gate": (
        lambda g: row_gate(g, operand(6, 20), operand(6, 2, "float32")), r"row_gate.*6x20.*6x2",
    ),
    "short_conv": (
        lambda g: short_conv(g, operand(6, 72), matrix("w", 16, 3, "float32"), None, BATCH),
        r"short_conv.*x72.*16x3",
    ),
    "causal_conv": (
        lambda g: causal_conv(g, operand(6, 24), matrix("w", 16, 3, "float32"), None, BATCH),
        r"causal_conv.*x24.*16x3",
    ),
    "gated_rms_norm": (
        lambda g: gated_rms_norm(g, operand(6, 24), operand(6, 24), norm(12), 1e-5),
        r"gated_rms_norm.*6x24.*12",
    ),
    "sigmoid_gate": (
        lambda g: sigmoid_gate(g, operand(6, 20), operand(6, 24)), r"glu.*6x24.*6x20",
    ),
    "gated_delta_gates": (
        lambda g: gated_delta_gates(g, operand(6, 4), operand(6, 4), norm(4), norm(5)),
        r"gated_delta_gates.*6x4.*1x5",
    ),
    "gated_delta_rule": (
        lambda g: delta_rule(g, 16, 40), r"gated_delta_rule: .*6x40.* is not 6x32",
    ),
    "gated_delta_rule heads": (
        lambda g: delta_rule(g, 24, 32, heads=(3, 4)), r"gated_delta_rule: \(3, 8\) and \(4, 8\)",
    ),
    "gated_delta_rule rows": (
        lambda g: delta_rule(g, 1040, 16, heads=(2, 2), key_dim=520), r"gated_delta_rule: 520 rows",
    ),
    "column_scale": (
        lambda g: column_scale(g, operand(6, 24), norm(20)), r"column_scale: .*6x24.*1x20",
    ),
    "mamba_steps": (
        lambda g: mamba_steps(g, operand(6, 4), norm(5)), r"mamba_steps: .*6x4.*1x5",
    ),
    "mamba_scan": (lambda g: scan(g, 24, 32), r"mamba_scan: .*6x24.*states of 8 rows"),
    "mamba_scan groups": (lambda g: scan(g, 32, 40), r"mamba_scan: .*6x40.*states of 8 rows"),
    "mamba_scan heads": (lambda g: scan(g, 32, 32, heads=4), r"mamba_scan: .*not have 4 heads"),
    "mamba_scan rows": (
        lambda g: scan(g, 32, 2080, state_size=520), r"mamba_scan: 520 rows",
    ),
    "gated_group_norm": (
        lambda g: gated_group_norm(
            g, operand(6, 24), operand(6, 24), norm(24), 1e-5, 2, gate_first=True
        ),
        r"gated_group_norm: .*6x24.* 2 groups",
    ),
    "with_factors": (
        lambda g: with_factors(g, routing(g), norm(9)), r"with_factors: .*1x9.* each of",
    ),
    "scaled": (lambda g: scaled(g, operand(6, 20), norm(2)), r"scaled: .* one number, got .*1x2"),
    "add_features": (
        lambda g: add_features(g, operand(5, 20), IMAGES, 1), r"add_features: x5x20.*fit 6 tokens",
    ),
    "weighted_sum": (
        lambda g: weighted_sum(g, operand(6, 20), operand(6, 16), 1.0, 1.0),
        r"weighted_sum: x6x20.*x6x16",
    ),
    "scaled_sum": (
        lambda g: scaled_sum(g, operand(6, 20), operand(6, 16), 1.0), r"scaled_sum: .*6x20.*6x16",
    ),
    "sparse_glu": (
        lambda g: sparse_glu(g, operand(6, 20), operand(5, 20), "silu", 1.0),
        r"sparse_glu: .*6x20.*5x20",
    ),
    "altup_predict": (
        lambda g: altup_predict(g, operand(6, 20), operand(12, 20), operand(6, 8), 0),
        r"altup_predict: .*6x20.*12x20.*6x8",
    ),
    "altup_predict stream": (
        lambda g: altup_predict(g, operand(6, 20), operand(12, 20), operand(6, 9), 3),
        r"altup_predict: .*6x20",
    ),
    "altup_correct": (
        lambda g: altup_correct(
            g, operand(6, 20), operand(6, 20), operand(6, 20), operand(6, 3), 0
        ),
        r"altup_correct: .*6x20.*6x3",
    ),
    "rms_match": (
        lambda g: rms_match(g, operand(6, 20), operand(5, 20), 1e-5), r"rms_match: .*6x20.*5x20",
    ),
    "stacked": (lambda g: stacked(g, [operand(6, 20), operand(5, 20)]), r"stacked: .*6x20.*5x20"),
    "unstacked": (lambda g: unstacked(g, operand(7, 20), 2), r"unstacked: .*7x20 .* 2 matrices"),
    "xielu": (
        lambda g: xielu(g, operand(6, 20), XIELUScalars(*[norm(1)] * 3, norm(2))),
        r"xielu: eps.*1x2",
    ),
    "glu": (lambda g: glu(g, operand(6, 20), operand(6, 24)), r"glu.*6x20.*6x24"),
    "clamped_glu": (
        lambda g: clamped_glu(g, operand(6, 20), operand(6, 24), ClampedGLU()),
        r"clamped_glu.*6x20.*6x24",
    ),
    "glu rows": (lambda g: glu(g, operand(6, 20), operand(5, 20)), r"glu.*6x20.*5x20"),
    "linear": (
        lambda g: linear(g, operand(6, 20), Linear("l", weight(8, 24), None, None), BATCH),
        r"gemm.*6x20.*8x24",
    ),
    "residual": (
        lambda g: linear(
            g, operand(6, 24), Linear("l", weight(8, 24), None, None), BATCH,
            operand(6, 16, "float32"),
        ),
        r"linear.*6x16.*6x8",
    ),
    "rms_norm": (
        lambda g: rms_norm(g, operand(6, 20, "float32"), norm(24), 1e-5), r"rms_norm.*6x20.*24",
    ),
    "layer_norm": (
        lambda g: layer_norm(g, operand(6, 20, "float32"), norm(24), None, 1e-5),
        r"layer_norm.*6x20.*24",
    ),
    "qk_norm": (lambda g: qk_norm(g, operand(6, 20), norm(6), 1e-5), r"qk_norm.*6x20.*6"),
    "qk_layer_norm": (
        lambda g: qk_layer_norm(g, operand(6, 24), matrix("w", 3, 6, "float32"), 1e-5),
        r"qk_layer_norm.*6x24.*3x6",
    ),
    "qk_layer_norm's bias": (
        lambda g: qk_layer_norm(
            g, operand(6, 24), matrix("w", 1, 6, "float32"), 1e-5, matrix("b", 1, 8, "float32")
        ),
        r"qk_layer_norm.*6x24.*1x6.*1x8",
    ),
    "rope": (
        lambda g: rope(g, [operand(6, 20)], norm(24), BATCH, 6, 6), r"rope.*6x20.*6",
    ),
    "rotary": (lambda g: rope(g, [operand(6, 20)], norm(24), BATCH, 10, 12), r"rope.*6x20.*10.*12"),
    "columns": (lambda g: columns(g, operand(6, 20), 8, 16), r"columns.*6x20.*8 to 24"),
    "group_columns": (
        lambda g: group_columns(g, operand(6, 20), 2, 10, 4, (4, 3)),
        r"group_columns.*6x20.*\[4, 3\] from column 4 of each of 2 groups of 10",
    ),
    "attention": (
        lambda g: attention(
            g, operand(6, 24), operand(6, 16), operand(6, 8), BATCH, 8, 1.0
        ),
        r"attention.*6x24.*6x16.*6x8",
    ),
    "sinks": (
        lambda g: attention(
            g, operand(6, 24), operand(6, 24), operand(6, 24), BATCH, 8, 1.0, sinks=norm(4)
        ),
        r"attention.*4 .*3 heads",
    ),
    "lm_head": (
        lambda g: logits_of_rows(g, operand(6, 20), Head(weight(40, 24)), BATCH, 0, 6),
        r"gemm.*6x20.*40x24",
    ),
}  # fmt: skip


@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE, cpu_profile(8)])
@pytest.mark.parametrize("name", list(WRONG))
def test_shapes_that_do_not_fit(name, profile):
    make, message = WRONG[name]
    with pytest.raises(GraphError, match=message):
        make(Graph("bfloat16", profile))
