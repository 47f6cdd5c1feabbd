"""The tape, and what formulas it differentiates, against central differences."""

import numpy as np
import pytest

from qlora_wgpu.ops.preference import PAIR_LOSSES
from qlora_wgpu.reference import (
    altup,
    attention,
    delta_net,
    experts,
    linear,
    loss,
    mamba,
    norms,
    pointwise,
    preference,
    score,
)
from qlora_wgpu.reference.tape import constant, erfc, grad, grads, through

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


def check(f, *args, of=1, **options):
    """The slope of f along a random direction of each argument is its gradient's."""
    made = f(*args, **options)
    several = isinstance(made, tuple)
    dys = [normal(*np.shape(y)) for y in (made if several else (made,))]
    places = list(range(of) if isinstance(of, int) else of)
    gradients = grads(f, dys if several else dys[0], *args, of=places, **options)

    def value(place, x):
        made = f(*args[:place], x, *args[place + 1 :], **options)
        return sum(np.sum(dy * y) for dy, y in zip(dys, made if several else (made,), strict=True))

    for place, gradient in zip(places, gradients, strict=True):
        x = np.asarray(args[place], np.float64)
        d, h = normal(*x.shape), 1e-6
        slope = (value(place, x + h * d) - value(place, x - h * d)) / (2 * h)
        expected = float(np.sum(gradient * d))
        assert gradient.shape == x.shape
        # Central differences in float64: rounding 1e-16 / h plus h squared.
        assert abs(slope - expected) <= 1e-7 * (1 + abs(expected)), (place, slope, expected)


X, Z = normal(3, 4, 5), normal(4, 1)
P = np.abs(normal(3, 4, 5)) + 0.5
IDS, PICKED = np.array([2, 0, 2]), np.array([[1, 1], [0, 2]])
PRIMITIVES = {
    "add": (lambda a, b: a + b, X, Z),
    "subtract": (lambda a, b: b - a, X, Z),
    "multiply": (lambda a, b: a * b, X, Z),
    "divide": (lambda a, b: b / a, P, Z),
    "negative": (lambda a: -a, X),
    "power": (lambda a: a**3, X),
    "square": (np.square, X),
    "exp": (np.exp, X),
    "expm1": (np.expm1, X),
    "log": (np.log, P),
    "sqrt": (np.sqrt, P),
    "tanh": (np.tanh, X),
    "erfc": (erfc, X),
    "maximum": (np.maximum, X, Z),
    "minimum": (np.minimum, X, Z),
    "logaddexp": (np.logaddexp, X, Z),
    "matmul": (lambda a, b: a @ b, X, normal(5, 2)),
    "matmul of stacks": (lambda a, b: a @ b, X, normal(3, 5, 2)),
    "einsum": (lambda a, b: np.einsum("ijk,kj->ji", a, b), X, normal(5, 4)),
    "where": (lambda a, b: np.where(X > 0, a, b), X, Z),
    "clip": (lambda a: np.clip(a, -0.5, 0.7), X),
    "concatenate": (lambda a, b: np.concatenate([a, b, a], axis=1), X, normal(3, 2, 5)),
    "split": (lambda a: np.split(a, 2, axis=1)[1], X),
    "repeat": (lambda a: np.repeat(a, 3, axis=1), X),
    "stack": (lambda a, b: np.stack([a, a, b]), Z, normal(4, 1)),
    "take_along_axis": (
        lambda a: np.take_along_axis(a, np.array([[1, 1], [0, 2]]), 1),
        normal(2, 3),
    ),
    "rows": (lambda a: a[IDS], X),
    "slices": (lambda a: a[:, 1:3, None, ::2], X),
    "reshape": (lambda a: a.reshape(3, -1), X),
    "transpose": (lambda a: a.transpose(2, 0, 1), X),
    "T": (lambda a: a.T, X),
    "sum": (lambda a: np.sum(a, axis=1), X),
    "whole sum": (lambda a: np.sum(a), X),
    "mean": (lambda a: np.mean(a, axis=-1, keepdims=True), X),
    "softmax": (lambda a: np.exp(a - np.max(a, axis=1, keepdims=True)), X - 9 * (X < 1)),
    "several": (lambda a, b: (a * b, a, b), X, Z),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives(name):
    f, *args = PRIMITIVES[name]
    if name == "softmax":  # whose shift is a constant
        f = lambda a, f=f: f(a) / np.sum(f(a), axis=1, keepdims=True)  # noqa: E731
    check(f, *args, of=len(args))


def test_bounds_belong_to_what_is_not_clipped():
    """As in torch.clamp."""
    x = np.array([-0.6, -0.5, 0.0, 0.7, 0.8])
    got = grad(lambda a: np.clip(a, -0.5, 0.7), np.ones(5), x)
    assert got.tolist() == [0, 1, 1, 1, 0]


def test_constants_have_no_gradient():
    assert np.array_equal(grad(lambda a: a * constant(a), 1.0, X), X)


def test_what_is_stored_in_another_type_is_rounded_on_its_way():
    """A result as the next op reads it, and its gradient as the one before does; no others."""
    made = grads(lambda a: (through(2 * a, np.round, np.floor), a, IDS), (X, X, 0.0), X, of=1)
    assert np.array_equal(made[0], 2 * np.floor(X) + X)
    assert np.array_equal(through(X, np.round), np.round(X)) and through(X) is X


SEGMENTS = np.array([[1, 1, 1, 4, 4, 0], [0, 2, 2, 2, 2, 2]])
HEADS = delta_net.Heads(keys=2, values=4, key_dim=3, value_dim=5)
TARGETS = np.array([3, -100, 8, 0, -100])
MASK = linear.dropout_mask(5, 8, 4, 0.3, 11, 22)
Q, K, V = normal(12, 24), normal(12, 8), normal(12, 8)
SINKS = np.linspace(-1.0, 2.0, 6)
ROWS, COLUMNS = normal(3, 8), normal(8)
AWAY = np.where(np.abs(ROWS + 0.015) < 0.02, 1.0, ROWS)  # from steps of a slope
FAR = 3 * normal(2, 9, 5)  # logits so far apart that no choice changes
WHICH = experts.route(FAR[0], 2, normalized=True)[0]
COUNTS = np.arange(1.0, 8), np.arange(3.0, 10)
FORMULAS = {
    "rms_norm": (1, norms.rms_norm, ROWS, COLUMNS, 1e-5),
    "layer_norm": (1, norms.layer_norm, ROWS, COLUMNS, 1e-5, COLUMNS),
    "qk_norm": (1, norms.qk_norm, ROWS, COLUMNS[:4], 1e-5),
    "qk_layer_norm": (1, norms.qk_layer_norm, ROWS, normal(2, 4), 1e-5),
    "of all heads": (1, norms.qk_layer_norm, ROWS, normal(1, 4), 1e-5, normal(1, 4)),
    "gated_rms_norm": (2, norms.gated_rms_norm, ROWS, normal(3, 8), COLUMNS[:4], 1e-5),
    "clamped_glu": (2, pointwise.clamped_glu, 2 * ROWS, 2 * normal(3, 8), 1.5, 1.702),
    "clip": (1, pointwise.clip, ROWS, 0.6),
    "sparse_glu": (2, pointwise.sparse_glu, ROWS, normal(3, 8), "gelu_pytorch_tanh", 0.3),
    "stacked, scaled_sum": (2, lambda a, b: 0.7 * np.concatenate([a + b, a]), ROWS, normal(3, 8)),
    "altup_predict": (3, altup.altup_predict, normal(3, 8), normal(6, 8), normal(3, 9), 1),
    "altup_correct": (
        5, lambda *given: altup.altup_correct(*given, numbers=[0, 2]), normal(6, 8), normal(3, 8),
        normal(3, 8), normal(3, 3), normal(3, 8),
    ),
    "rms_match": ((0, 1, 3), altup.rms_match, normal(3, 8), normal(3, 8), 1e-5, normal(3, 8)),
    "row_gate": (2, pointwise.row_gate, ROWS, normal(3, 1)),
    "xielu": (1, pointwise.xielu, AWAY, (0.7, -0.4, 0.45, -0.03)),
    "column_scale": (1, pointwise.column_scale, ROWS, COLUMNS),
    "scaled": (1, pointwise.scaled, ROWS, 0.3),
    "add_features": (1, loss.add_features, ROWS, normal(2, 8), np.array([0, 2, 1])),
    "with_features": (1, loss.with_features, ROWS, normal(2, 8), np.array([0, 2, 0]), 3.0),
    "weighted_sum": (1, pointwise.weighted_sum, ROWS, normal(3, 8), -0.7, 2.0),
    "linear": (
        (0, 2, 3), linear.linear, normal(5, 4), normal(6, 4), normal(3, 4), normal(6, 3), 0.7, MASK,
        normal(6),
    ),
    "dora": (2, linear.dora, ROWS, COLUMNS, np.abs(normal(8))),
    "dropout_parts": (1, linear.dropout_parts, normal(5, 4), MASK),
    "attention": (3, attention.attention, Q, K, V, SEGMENTS, 4, 0.4),
    "window": (3, attention.attention, Q, K, V, SEGMENTS, 4, 0.4, 2, None, SINKS),
    "softcap": (3, attention.attention, Q, K, V, SEGMENTS, 4, 0.4, None, 1.5, SINKS),
    "rope": (1, attention.rope, ROWS, np.array([0, 2, 1]), normal(3, 2, 2), 4, 4),
    "a part": (1, attention.rope, ROWS, np.array([0, 2, 1]), normal(3, 1, 2), 4, 2),
    "interleaved": (1, attention.rope, ROWS, np.array([0, 2, 1]), normal(3, 2, 2), 4, 4, True),
    "group_columns": (1, attention.group_columns, normal(3, 22), 2, 11, 2, (4, 1, 2)),
    "head_parts": (
        2, lambda own, all_: attention.head_parts([(all_, 0, 4, 3), (own, 6, 1, 3)], 2, 7),
        normal(4, 12), normal(4, 9),
    ),
    "short_conv": (1, delta_net.short_conv, normal(12, 9), normal(3, 3), normal(3), SEGMENTS),
    "causal_conv": (1, delta_net.causal_conv, normal(12, 3), normal(3, 3), 0.0, SEGMENTS),
    "gates": (
        2, delta_net.gated_delta_gates, normal(4, 3), normal(4, 3), normal(3), normal(3), 2.0,
    ),
    "gated_delta_rule": (
        5, delta_net.gated_delta_rule, normal(12, 6), normal(12, 6), normal(12, 20),
        -np.exp(normal(12, 4)), 1 / (1 + np.exp(-normal(12, 4))), SEGMENTS, HEADS,
    ),
    "mamba_steps": (1, mamba.mamba_steps, normal(4, 3), normal(3), (0.3, 1.9)),
    "mamba_scan": (
        3, mamba.mamba_scan, normal(12, 20), normal(12, 12), np.exp(normal(12, 4)), normal(4),
        normal(4), SEGMENTS, 3,
    ),
    "gated_group_norm": (
        2, lambda x, z: mamba.gated_group_norm(x, z, COLUMNS, 1e-5, 2, gate_first=True), ROWS,
        normal(3, 8),
    ),
    "gate after": (
        2, lambda x, z: mamba.gated_group_norm(x, z, COLUMNS, 1e-5, 2, gate_first=False), ROWS,
        normal(3, 8),
    ),
    "mix": (
        (0, 2, 3), experts.mix, normal(9, 4), WHICH, normal(9, 2), normal(5, 3, 4), normal(5, 3),
    ),
    "with_factors": (1, experts.with_factors, normal(9, 2), WHICH, normal(5)),
    "balance_loss": (1, experts.balance_loss, FAR, 2, np.array([1.0] * 7 + [0.0] * 2)),
    "losses": (2, loss.losses, normal(5, 4), normal(9, 4), TARGETS),
    "smooth losses": (
        2, loss.losses, normal(5, 4), normal(9, 4), TARGETS, 0.4, 2.0, 0.2, 0.1,
    ),
    "with_pair": (
        4, lambda hidden, head, a, b: loss.losses(
            *loss.with_pair(hidden, head, a, b, 1.7, MASK), TARGETS, 0.4, 2.0
        ), normal(5, 4), normal(9, 4), normal(3, 4), normal(9, 3),
    ),
    "overwritten": ((0, 2), loss.overwritten, normal(9, 4), np.array([8, 5, 0]), normal(3, 4)),
    "lookup": (1, loss.lookup, normal(9, 4), np.array([3, 8, 0, 8, 2]), 2.0),
    "lookup_with_pair": (
        (0, 2, 3), loss.lookup_with_pair, normal(9, 4), np.array([3, 8, 0, 8, 2]), normal(3, 9),
        normal(4, 3), 1.7, 3.0,
    ),
    "pairs of rewards": (1, score.pairs, normal(8, 1), np.array([0.5, 0, -1, 0]), 0.1),
    "single labels": (1, score.single_label, normal(3, 4), np.array([3, 0, 3]), P[0, 0, :4]),
    "several labels": (1, score.multi_label, normal(3, 4), np.eye(3, 4)),
    "regression": (1, score.regression, normal(3, 4), normal(3, 4)),
    "odds": (2, preference.odds, -np.abs(normal(7)), -np.abs(normal(7)), 0.4),
    "singles": (1, preference.singles, normal(7), np.arange(7) % 3 > 0, 0.4, 0.3, (1.2, 0.7)),
}  # fmt: skip
FORMULAS |= {
    f"glu by {name}": (2, pointwise.glu, ROWS, normal(3, 8), name)
    for name in (
        "silu", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "relu2", "sigmoid",
    )
}  # fmt: skip
FORMULAS |= {
    f"pairs by {name}": (2, preference.pairs, normal(7), normal(7), name, COUNTS, 0.4, 0.2)
    for name in PAIR_LOSSES
}
RULES = [
    ({"sigmoid": True, "normalized": True, "least": 1e-20, "scale": 1.7}, (4, 2, True)),
    ({"sigmoid": False, "normalized": False, "scale": 3.0}, (4, 2, False)),
    ({"sigmoid": False, "normalized": True, "least": 0.7, "at_least": True}, (1, 1, False)),
    ({"sigmoid": True, "normalized": True, "least": 0.3}, (1, 1, False)),
    ({"sigmoid": True, "normalized": False}, (1, 1, False)),
    ({"sigmoid": False, "normalized": True}, (1, 1, False)),
]


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name):
    of, f, *args = FORMULAS[name]
    check(f, *args, of=of)


@pytest.mark.parametrize(("rule", "groups"), RULES)
def test_weights_of_experts(rule, groups):
    logits, bias = normal(9, 8), 0.2 * normal(8)
    how = {**rule, **dict(zip(("groups", "top_groups", "pairs"), groups, strict=True))}
    ids, _ = experts.route_by_scores(logits, bias, 3, **how)
    again, _ = experts.route_by_scores(logits + 1e-5 * normal(9, 8), bias, 3, **how)
    assert np.array_equal(ids, again)
    check(lambda logits: experts.route_by_scores(logits, bias, 3, **how)[1], logits, of=1)


@pytest.mark.parametrize("options", [(None, None), (2, None), (None, 1.5)])
def test_the_output_as_it_was_stored(options):
    """Softmax's gradient subtracts do·o: with o itself nothing changes, with another as much."""
    do = normal(12, 24)
    given = Q, K, V, SEGMENTS, 4, 0.4, *options, SINKS
    exact = grads(attention.attention, do, *given, of=3)
    o = attention.attention(*given)
    for a, b in zip(grads(attention.attention, do, *given, o, of=3), exact, strict=True):
        assert np.allclose(a, b, rtol=0, atol=1e-13)
    if options[1] is None:
        off = normal(12, 24)
        dq, _, dv = grads(attention.attention, do, *given, o + off, of=3)
        assert np.allclose(dv, exact[2], rtol=0, atol=1e-13)
        delta = np.sum((do * off).reshape(12, 6, 4), axis=2, keepdims=True)
        keys = attention.attention(Q, K, K, *given[3:]).reshape(12, 6, 4)  # what a query sees
        expected = exact[0] - 0.4 * (delta * keys).reshape(12, 24)
        assert np.allclose(dq, expected, rtol=0, atol=1e-12)


def test_padding_gives_no_gradient():
    """Of a lookup's rows, and of A, but not of B; token 8 is there twice."""
    ids, dy, weight = np.array([3, 8, 0, 8, 2]), normal(5, 4), normal(9, 4)
    masked = grad(loss.lookup, dy, weight, ids, padding=8)
    assert not masked[8].any() and masked[0].any()
    given = weight, ids, normal(3, 9), normal(4, 3), 1.7, 3.0
    _, db = grads(loss.lookup_with_pair, dy, *given, of=(2, 3))
    da, masked = grads(loss.lookup_with_pair, dy, *given, 8, of=(2, 3))
    assert not da[:, 8].any() and da[:, 3].all() and np.array_equal(masked, db)


def test_dropout_mask_keeps_the_right_share():
    mask = linear.dropout_mask(300, 304, 300, 0.25, 5, 6)
    assert set(np.unique(mask)) == {0.0, float(np.float32(1 / 0.75))}
    assert abs((mask == 0).mean() - 0.25) < 0.01
    other = linear.dropout_mask(300, 304, 300, 0.25, 6, 6)
    both = ((mask == 0) & (other == 0)).mean()
    assert abs(both - 0.25**2) < 0.01  # independent


def test_the_norm_of_a_merged_weight():
    w, a, b = normal(5, 6), normal(2, 6), normal(5, 2)
    assert np.allclose(linear.dora_norm(w, a, b, 0.5), np.linalg.norm(w + 0.5 * b @ a, axis=1))


def test_the_loss_of_balanced_experts_is_how_many_a_token_meets():
    logits = np.log(np.eye(4)[[0, 1, 2, 3]] + 1e-9)
    assert abs(experts.balance_loss([logits], 1, np.ones(4)) - 1) < 1e-6
    unbalanced = np.log(np.eye(4)[[0, 0, 0, 0]] + 1e-9)
    assert abs(experts.balance_loss([unbalanced], 1, np.ones(4)) - 4) < 1e-6
