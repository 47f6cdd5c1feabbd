"""Ops behind ops: whatever one hands on, in values and in gradients, the other reads rightly."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, Bench, rounded

from qlora_wgpu.kernels.common import DropoutMask
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.model.image_inputs import ImageInputs
from qlora_wgpu.ops.altup import altup_correct, rms_match, stacked, unstacked
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import ImageLayout, make_batch_buffers
from qlora_wgpu.ops.columns import HeadPart, column_scale, columns, group_columns, head_parts
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_rule, short_conv
from qlora_wgpu.ops.image_features import add_features
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.mamba import gated_group_norm, mamba_scan, mamba_steps
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.ops.pointwise import (
    ClampedGLU,
    XIELUScalars,
    activation,
    clamped_glu,
    clip,
    dropout_parts,
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
from qlora_wgpu.ops.tensor import as_float32, cast
from qlora_wgpu.reference import altup as altup_reference
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import delta_net as delta_net_reference
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference import mamba as mamba_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grad

ROWS, HEADS, HEAD_DIM = 9, 2, 16
COLUMNS = HEADS * HEAD_DIM
_RANDOM = np.random.default_rng(11)
WEIGHT, BIAS, HEAD_WEIGHT = (_RANDOM.standard_normal(n) for n in (COLUMNS, COLUMNS, HEAD_DIM))
HEAD_WEIGHTS = _RANDOM.standard_normal((HEADS, HEAD_DIM))
MATRIX = _RANDOM.standard_normal((COLUMNS, COLUMNS)) / np.sqrt(COLUMNS)
OTHER, KEYS, VALUES = (_RANDOM.standard_normal((ROWS, COLUMNS)) for _ in range(3))
TABLE = _RANDOM.standard_normal((ROWS, HEAD_DIM // 2, 2))
POSITIONS, SAMPLE = np.arange(ROWS), np.ones((1, ROWS), int)
SCALE = 1 / np.sqrt(HEAD_DIM)
HALVES = (HEAD_DIM // 2, HEAD_DIM // 2)


@dataclass(frozen=True)
class Op:
    """A function of one (ROWS, COLUMNS) matrix, traced and in float64.

    Where its slope has steps, rounding before it may take an element over one: its gradient is
    compared at the very numbers that it has read.
    """

    traced: Callable
    formula: Callable
    has_steps: bool = False


def _roped(bench, x):
    table = bench.graph.constant("table", TABLE.astype(np.float32))
    return rope(bench.graph, [x], table, bench.batch_of(1, ROWS), HEAD_DIM, HEAD_DIM)[0]


THREE = _RANDOM.standard_normal((3 * COLUMNS, COLUMNS)) / np.sqrt(COLUMNS)
TAPS = _RANDOM.standard_normal((COLUMNS, 3))
BENDS = (0.7, -0.4, 0.45, -1e-6)


def _dropped(bench, x):
    batch = bench.batch_of(1, ROWS, dropout_key=5)
    return glu(bench.graph, *dropout_parts(bench.graph, x, DropoutMask(0.3, 6), batch))


def _linear(bench, x):
    matrix = DenseMatrix(COLUMNS, COLUMNS, ((0, bench.operand(MATRIX)),))
    return linear(bench.graph, x, Linear("l", matrix, None, None), bench.batch_of(1, ROWS))


def _short_conv(bench, x):
    matrix = DenseMatrix(3 * COLUMNS, COLUMNS, ((0, bench.operand(THREE)),))
    batch = bench.batch_of(1, ROWS)
    x = linear(bench.graph, x, Linear("in", matrix, None, None), batch)
    return short_conv(bench.graph, x, bench.given(TAPS), None, batch)


def _attention(bench, x):
    k, v, batch = bench.operand(KEYS), bench.operand(VALUES), bench.batch_of(1, ROWS)
    return attention(bench.graph, x, k, v, batch, HEAD_DIM, SCALE)


DELTA_HEADS = delta_net_reference.Heads(HEADS, HEADS, HEAD_DIM, HEAD_DIM)
GATES = -_RANDOM.random((ROWS, HEADS)), _RANDOM.random((ROWS, HEADS))


def _gated_delta(bench, x):
    k, v, batch = bench.operand(KEYS), bench.operand(VALUES), bench.batch_of(1, ROWS)
    gates, sizes = (bench.given(a) for a in GATES), (HEADS, HEADS, HEAD_DIM, HEAD_DIM)
    return gated_delta_rule(bench.graph, x, k, v, *gates, batch, *sizes, chunk=16)


STEPS, SCALARS = _RANDOM.random((ROWS, HEADS)), _RANDOM.random((2, HEADS))
BC = _RANDOM.standard_normal((ROWS, COLUMNS))


def _mamba_scan(bench, x):
    rest = bench.operand(BC), bench.given(STEPS), *(bench.given(a) for a in SCALARS)
    return mamba_scan(bench.graph, x, *rest, bench.batch_of(1, ROWS), HEADS, HEAD_DIM, chunk=16)


def _mamba_steps(bench, x):
    return cast(bench.graph, mamba_steps(bench.graph, x, bench.given(BIAS)))


def _sliced(bench, x):
    """Both halves, exchanged by two slices whose sum with the other half is taken."""
    left = columns(bench.graph, x, 0, COLUMNS)
    return glu(bench.graph, left, columns(bench.graph, x, 0, COLUMNS))


GATE = _RANDOM.standard_normal((ROWS, 1))
FEATURES, PLACES = _RANDOM.standard_normal((4, COLUMNS)), np.array([[0, 0, 1, 2, 0, 3, 4, 0, 0]])


def _with_features(bench, x):
    batch = make_batch_buffers(1, ROWS, images=ImageLayout(0), image_rows=4)
    images = ImageInputs(FEATURES.astype(np.float32), PLACES)
    batch.storage.data = encode_batch(batch, np.zeros_like(SAMPLE), SAMPLE, images=images)
    batch.features[1] = bench.given(FEATURES)
    return add_features(bench.graph, x, batch, 1)


STREAMS, GAINS = _RANDOM.standard_normal((2 * ROWS, COLUMNS)), _RANDOM.standard_normal((ROWS, 3))


def _corrected(bench, x):
    """The other of two corrected streams, where all others are frozen."""
    given = (bench.given(a) for a in (KEYS, GAINS))
    predicted, gains = given
    y = altup_correct(bench.graph, bench.given(STREAMS), predicted, x, gains, 0)
    return cast(bench.graph, unstacked(bench.graph, y, 2)[1])


def _corrected_exactly(x):
    y = altup_reference.altup_correct(STREAMS, KEYS, x, GAINS, numbers=[1, 2])
    return np.split(y, 2)[1]


DROPPED = linear_reference.dropout_mask(ROWS, COLUMNS, COLUMNS, 0.3, 5, 6)
OPS = {
    "rms_norm": Op(
        lambda b, x: rms_norm(b.graph, x, b.given(WEIGHT), 1e-5),
        lambda x: norms_reference.rms_norm(x, WEIGHT, 1e-5),
    ),
    "layer_norm": Op(
        lambda b, x: layer_norm(b.graph, x, b.given(WEIGHT), b.given(BIAS), 1e-5),
        lambda x: norms_reference.layer_norm(x, WEIGHT, 1e-5, BIAS),
    ),
    "qk_norm": Op(
        lambda b, x: qk_norm(b.graph, x, b.given(HEAD_WEIGHT), 1e-5),
        lambda x: norms_reference.qk_norm(x, HEAD_WEIGHT, 1e-5),
    ),
    "qk_layer_norm": Op(
        lambda b, x: qk_layer_norm(b.graph, x, b.given(HEAD_WEIGHTS), 1e-5),
        lambda x: norms_reference.qk_layer_norm(x, HEAD_WEIGHTS, 1e-5),
    ),
    "rope": Op(_roped, lambda x: attention_reference.rope(x, POSITIONS, TABLE, HEAD_DIM, HEAD_DIM)),
    "activation": Op(
        lambda b, x: activation(b.graph, x, "gelu"),
        lambda x: pointwise_reference.activation(x, "gelu"),
    ),
    "clip": Op(
        lambda b, x: clip(b.graph, x, 0.75),
        lambda x: pointwise_reference.clip(x, 0.75),
        has_steps=True,
    ),
    "xielu": Op(
        lambda b, x: xielu(b.graph, x, XIELUScalars(*(b.given(np.array([s])) for s in BENDS))),
        lambda x: pointwise_reference.xielu(x, BENDS),
    ),
    "parts of a dropout": Op(
        _dropped,
        lambda x: pointwise_reference.glu(*linear_reference.dropout_parts(x, DROPPED), "silu"),
    ),
    "scaled": Op(lambda b, x: scaled(b.graph, x, b.given(np.array([-0.5]))), lambda x: -0.5 * x),
    "add_features": Op(
        _with_features, lambda x: loss_reference.add_features(x, FEATURES, PLACES[0])
    ),
    "weighted sum": Op(
        lambda b, x: weighted_sum(b.graph, x, b.operand(OTHER), 0.5, 2.0),
        lambda x: 0.5 * x + 2 * OTHER,
    ),
    "tanh": Op(lambda b, x: tanh(b.graph, x), np.tanh),
    "scaled_sum": Op(
        lambda b, x: cast(b.graph, scaled_sum(b.graph, x, b.operand(OTHER), 0.5)),
        lambda x: 0.5 * (x + OTHER),
    ),
    "sparse_glu": Op(
        lambda b, x: sparse_glu(b.graph, x, b.operand(OTHER), "silu", 0.3),
        lambda x: pointwise_reference.sparse_glu(x, OTHER, "silu", 0.3),
        has_steps=True,
    ),
    "rms_match": Op(
        lambda b, x: cast(b.graph, rms_match(b.graph, x, b.given(OTHER), 1e-5)),
        lambda x: altup_reference.rms_match(x, OTHER, 1e-5),
    ),
    "altup_correct": Op(_corrected, _corrected_exactly),
    "stacked": Op(
        lambda b, x: glu(b.graph, *unstacked(b.graph, stacked(b.graph, [x, x]), 2)),
        lambda x: pointwise_reference.glu(x, x, "silu"),
    ),
    "gate": Op(
        lambda b, x: glu(b.graph, x, b.operand(OTHER)),
        lambda x: pointwise_reference.glu(x, OTHER, "silu"),
    ),
    "clamped gate": Op(  # at none of the values: rounded ones may be on its other side
        lambda b, x: clamped_glu(b.graph, x, b.operand(OTHER), ClampedGLU(1000.0)),
        lambda x: pointwise_reference.clamped_glu(x, OTHER, 1000.0, 1.702),
    ),
    "gate and up": Op(
        lambda b, x: glu(b.graph, x, x), lambda x: pointwise_reference.glu(x, x, "silu")
    ),
    "head_parts": Op(
        lambda b, x: head_parts(
            b.graph, [HeadPart(x, HEAD_DIM, 6, 10), HeadPart(x, HEAD_DIM, 0, 6)], HEADS, HEAD_DIM
        ),
        lambda x: attention_reference.head_parts(
            [(x, HEAD_DIM, 6, 10), (x, HEAD_DIM, 0, 6)], HEADS, HEAD_DIM
        ),
    ),
    "row_gate": Op(
        lambda b, x: cast(b.graph, row_gate(b.graph, x, b.given(GATE))),
        lambda x: pointwise_reference.row_gate(x, GATE),
    ),
    "slices": Op(_sliced, lambda x: pointwise_reference.glu(x, x, "silu")),
    "regrouped": Op(  # (head, half, element) to (half, head, element)
        lambda b, x: group_columns(b.graph, x, HEADS, HEAD_DIM, 0, HALVES),
        lambda x: attention_reference.group_columns(x, HEADS, HEAD_DIM, 0, HALVES),
    ),
    "linear": Op(_linear, lambda x: x @ MATRIX.T),
    "short_conv": Op(
        _short_conv, lambda x: delta_net_reference.short_conv(x @ THREE.T, TAPS, 0.0, SAMPLE)
    ),
    "causal_conv": Op(
        lambda b, x: causal_conv(b.graph, x, b.given(TAPS), None, b.batch_of(1, ROWS)),
        lambda x: delta_net_reference.causal_conv(x, TAPS, 0.0, SAMPLE),
    ),
    "norm and its gate": Op(
        lambda b, x: gated_rms_norm(b.graph, x, x, b.given(HEAD_WEIGHT), 1e-5),
        lambda x: norms_reference.gated_rms_norm(x, x, HEAD_WEIGHT, 1e-5),
    ),
    "sigmoid_gate": Op(
        lambda b, x: sigmoid_gate(b.graph, x, b.operand(OTHER)),
        lambda x: pointwise_reference.glu(OTHER, x, "sigmoid"),
    ),
    "gated_delta_rule": Op(
        _gated_delta,
        lambda x: delta_net_reference.gated_delta_rule(
            x, KEYS, VALUES, *GATES, SAMPLE, DELTA_HEADS
        ),
    ),
    "mamba_scan": Op(
        _mamba_scan,
        lambda x: mamba_reference.mamba_scan(x, BC, STEPS, *SCALARS, SAMPLE, HEAD_DIM),
    ),
    "column_scale": Op(
        lambda b, x: column_scale(b.graph, x, b.given(WEIGHT)),
        lambda x: pointwise_reference.column_scale(x, WEIGHT),
    ),
    "mamba_steps": Op(_mamba_steps, lambda x: mamba_reference.mamba_steps(x, BIAS, (0.0, None))),
    "gated_group_norm": Op(
        lambda b, x: gated_group_norm(
            b.graph, x, b.operand(OTHER), b.given(WEIGHT), 1e-5, HEADS, gate_first=True
        ),
        lambda x: mamba_reference.gated_group_norm(x, OTHER, WEIGHT, 1e-5, HEADS, gate_first=True),
    ),
    "attention": Op(
        _attention,
        lambda x: attention_reference.attention(x, KEYS, VALUES, SAMPLE, HEAD_DIM, SCALE),
    ),
    "to float32": Op(lambda b, x: as_float32(b.graph, x), lambda x: x),
    "to operand": Op(lambda b, x: cast(b.graph, x), lambda x: x),
}
# Sums in float32; a few roundings of operands and gradients on the way.
BOUNDS = {"float32": 2e-5, "bfloat16": 3e-2}


def _off(got, exact):
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("second", OPS)
def test_every_op_behind_every_other(device, profile, dtype, second):
    x, dy = np.random.default_rng(12).standard_normal((2, ROWS, COLUMNS))  # in any order of tests
    consumer = OPS[second]
    kinds = [("float32", "float32")] + ([(dtype, dtype)] if dtype != "float32" else [])
    for (first, producer), (given, arriving) in itertools.product(OPS.items(), kinds):
        bench = Bench(device, dtype, PROFILES[profile])
        tx = bench.given(x, given, grad=True)
        th = producer.traced(bench, tx)
        y = consumer.traced(bench, th)
        (dx,) = bench.gradients(y, bench.given(dy, arriving), tx)
        got_y, got_dx, *read = bench.run(y, dx, *([th] if consumer.has_steps else []))
        exact_x, exact_dy = rounded(x, given), rounded(dy, arriving)
        h = producer.formula(exact_x)
        at = read[0] if consumer.has_steps else h
        exact_dx = grad(producer.formula, grad(consumer.formula, exact_dy, at), exact_x)
        where = f"{first}, then {second}, {given} in, {arriving} back"
        assert _off(got_y, consumer.formula(h)) <= BOUNDS[dtype], where
        assert _off(got_dx, exact_dx) <= BOUNDS[dtype], where
