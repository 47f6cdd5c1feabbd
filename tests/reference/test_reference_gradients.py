"""The references' backward against central differences of their forward, random cotangents."""

import numpy as np
import pytest

from qlora_wgpu.ops.preference import PAIR_LOSSES
from qlora_wgpu.reference import (
    attention,
    causal_conv,
    clamped_glu,
    clip,
    cross_entropy,
    dora,
    dropout,
    embedding_pair,
    expert_scores,
    experts,
    gated_delta,
    gated_delta_gates,
    gated_rms_norm,
    glu,
    group_columns,
    head_pair,
    head_parts,
    layer_norm,
    linear,
    preference,
    qk_layer_norm,
    rms_norm,
    rope,
    router_balance,
    row_gate,
    scaling,
    short_conv,
    trained_matrix,
    trained_rows,
    xielu,
)

RNG = np.random.default_rng(0)


def check(f, x, gradient):
    """f maps x to a number; its slope along a random direction is the gradient's."""
    d = RNG.standard_normal(x.shape)
    h = 1e-6
    slope = (f(x + h * d) - f(x - h * d)) / (2 * h)
    expected = float(np.sum(gradient * d))
    # Central differences in float64: rounding 1e-16 / h plus h squared.
    assert abs(slope - expected) <= 1e-7 * (1 + abs(expected)), (slope, expected)


def normal(*shape):
    return RNG.standard_normal(shape)


def test_rms_norm():
    x, w, dy = normal(3, 7), normal(7), normal(3, 7)
    dx = rms_norm.backward(dy, x, w, 1e-5)
    check(lambda v: np.sum(dy * rms_norm.forward(v, w, 1e-5)), x, dx)


@pytest.mark.parametrize("rotary_dim", [6, 4])
def test_rope(rotary_dim):
    x, dy, positions = normal(4, 12), normal(4, 12), np.array([0, 3, 1, 2])
    table = normal(4, rotary_dim // 2, 2)
    dx = rope.backward(dy, positions, table, 6, rotary_dim)
    check(lambda v: np.sum(dy * rope.forward(v, positions, table, 6, rotary_dim)), x, dx)


@pytest.mark.parametrize("sinks", [None, np.linspace(-1.0, 2.0, 6)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (2, None), (None, 1.5)])
def test_attention(window, softcap, sinks):
    segments = np.array([[1, 1, 2, 2, 0], [0, 0, 1, 1, 1]])
    q, k, v, do = normal(10, 24), normal(10, 8), normal(10, 8), normal(10, 24)
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    dq, dk, dv = attention.backward(do, q, k, v, segments, 4, 0.4, **options)

    def value(q=q, k=k, v=v):
        return float(np.sum(do * attention.forward(q, k, v, segments, 4, 0.4, **options)))

    check(lambda x: value(q=x), q, dq)
    check(lambda x: value(k=x), k, dk)
    check(lambda x: value(v=x), v, dv)


def test_clamped_glu():
    dy = normal(3, 7)
    gate, up = 2 * normal(3, 7), 2 * normal(3, 7)
    scalars = (1.5, 1.702)  # of which some are beyond
    assert (gate > 1.5).any() and (up > 1.5).any() and (up < -1.5).any()
    dgate, dup = clamped_glu.backward(dy, gate, up, *scalars)
    check(lambda v: np.sum(dy * clamped_glu.forward(v, up, *scalars)), gate, dgate)
    check(lambda v: np.sum(dy * clamped_glu.forward(gate, v, *scalars)), up, dup)


def test_layer_norm():
    x, w, dy = normal(3, 7), normal(7), normal(3, 7)
    dx = layer_norm.backward(dy, x, w, 1e-5)
    check(lambda v: np.sum(dy * layer_norm.forward(v, w, normal(7) * 0, 1e-5)), x, dx)


def test_qk_layer_norm():
    x, w, dy = normal(3, 12), normal(2, 6), normal(3, 12)
    dx = qk_layer_norm.backward(dy, x, w, 1e-5)
    check(lambda v: np.sum(dy * qk_layer_norm.forward(v, w, 1e-5)), x, dx)
    w, b = normal(1, 6), normal(1, 6)  # of both heads
    dx = qk_layer_norm.backward(dy, x, w, 1e-5)
    check(lambda v: np.sum(dy * qk_layer_norm.forward(v, w, 1e-5, b)), x, dx)


@pytest.mark.parametrize(
    "activation",
    ["silu", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "relu2", "sigmoid"],
)
def test_glu(activation):
    gate, up, dy = normal(3, 5), normal(3, 5), normal(3, 5)
    dgate, dup = glu.backward(dy, gate, up, activation)
    check(lambda v: np.sum(dy * glu.forward(v, up, activation)), gate, dgate)
    check(lambda v: np.sum(dy * glu.forward(gate, v, activation)), up, dup)


def test_clip():
    x, dy = normal(3, 5), normal(3, 5)
    check(lambda v: np.sum(dy * clip.forward(v, 0.6)), x, clip.backward(dy, x, 0.6))


def test_xielu():
    x, dy, scalars = normal(3, 5), normal(3, 5), (0.7, -0.4, 0.45, -0.03)
    x = np.where(np.abs(x + 0.015) < 0.02, 1.0, x)  # away from the steps of the slope
    dx = dy * xielu.slope(x, scalars)
    check(lambda v: np.sum(dy * xielu.forward(v, scalars)), x, dx)


def test_group_columns():
    x, dy, parts = normal(3, 22), normal(3, 14), (2, 11, 2, (4, 1, 2))
    dx = group_columns.backward(dy, 22, *parts)
    check(lambda v: np.sum(dy * group_columns.forward(v, *parts)), x, dx)


def test_factors_of_experts():
    weights, dy, ids = normal(4, 2), normal(4, 2), np.array([[0, 2], [1, 0], [2, 1], [1, 2]])
    factors = normal(3)
    dw = experts.with_factors(dy, ids, factors)
    check(lambda v: np.sum(dy * experts.with_factors(v, ids, factors)), weights, dw)


def test_scaling():
    x, z, dy = normal(3, 5), normal(3, 5), normal(3, 5)
    check(lambda v: np.sum(dy * scaling.scaled(v, 0.3)), x, scaling.scaled(dy, 0.3))
    dx = scaling.scaled(dy, -0.7)
    check(lambda v: np.sum(dy * scaling.weighted_sum(v, z, -0.7, 2.0)), x, dx)


def test_short_conv():
    x, w, bias, dy = normal(8, 9), normal(3, 3), normal(3), normal(8, 3)
    segments = np.array([[1, 1, 1, 4], [0, 2, 2, 2]])
    dx = short_conv.backward(dy, x, w, bias, segments)
    check(lambda v: np.sum(dy * short_conv.forward(v, w, bias, segments)), x, dx)


def test_causal_conv():
    x, w, bias, dy = normal(8, 3), normal(3, 3), normal(3), normal(8, 3)
    segments = np.array([[1, 1, 1, 4], [0, 2, 2, 2]])
    dx = causal_conv.backward(dy, x, w, bias, segments)
    check(lambda v: np.sum(dy * causal_conv.forward(v, w, bias, segments)), x, dx)


def test_gated_rms_norm():
    x, z, w, dy = normal(3, 8), normal(3, 8), normal(4), normal(3, 8)
    dx, dz = gated_rms_norm.backward(dy, x, z, w, 1e-5)
    check(lambda v: np.sum(dy * gated_rms_norm.forward(v, z, w, 1e-5)), x, dx)
    check(lambda v: np.sum(dy * gated_rms_norm.forward(x, v, w, 1e-5)), z, dz)


def test_gated_delta_gates():
    a, b, a_log, dt_bias = normal(4, 3), normal(4, 3), normal(3), normal(3)
    ddecay, dbeta = normal(4, 3), normal(4, 3)
    da, db = gated_delta_gates.backward(ddecay, dbeta, a, b, a_log, dt_bias)

    def value(a=a, b=b):
        decay, beta = gated_delta_gates.forward(a, b, a_log, dt_bias)
        return float(np.sum(ddecay * decay) + np.sum(dbeta * beta))

    check(lambda v: value(a=v), a, da)
    check(lambda v: value(b=v), b, db)


def test_gated_delta():
    heads = gated_delta.Heads(keys=2, values=4, key_dim=3, value_dim=5)
    segments = np.array([[1, 1, 1, 4, 4, 0], [0, 2, 2, 2, 2, 2]])
    q, k, v, do = normal(12, 6), normal(12, 6), normal(12, 20), normal(12, 20)
    inputs = [q, k, v, -np.exp(normal(12, 4)), 1 / (1 + np.exp(-normal(12, 4)))]
    gradients = gated_delta.backward(do, *inputs, segments, heads)
    for i, gradient in enumerate(gradients):

        def value(x, i=i):
            given = [*inputs[:i], x, *inputs[i + 1 :]]
            return np.sum(do * gated_delta.forward(*given, segments, heads))

        check(value, inputs[i], gradient)


def test_linear():
    x, w, bias, a, b = normal(4, 6), normal(5, 6), normal(5), normal(3, 6), normal(5, 3)
    mask = linear.dropout_mask(4, 8, 6, 0.3, 11, 22)
    dy = normal(4, 5)
    dx, da, db = linear.backward(dy, x, w, a, b, 0.7, mask)
    args = {"x": x, "a": a, "b": b}

    def value(name, v):
        given = {**args, name: v}
        return np.sum(dy * linear.forward(given["x"], w, bias, given["a"], given["b"], 0.7, mask))

    for name, gradient in (("x", dx), ("a", da), ("b", db)):
        check(lambda v, name=name: value(name, v), args[name], gradient)


def test_cross_entropy():
    hidden, head, targets = normal(5, 4), normal(9, 4), np.array([3, -100, 8, 0, -100])
    dhidden = cross_entropy.backward(hidden, head, targets)
    check(lambda v: cross_entropy.forward(v, head, targets), hidden, dhidden)
    bent = cross_entropy.backward(hidden, head, targets, 0.4, 2.0)
    check(lambda v: cross_entropy.forward(v, head, targets, 0.4, 2.0), hidden, bent)
    assert not dhidden[[1, 4]].any()
    given = {"smoothing": 0.2, "z_loss": 0.1}
    smooth = cross_entropy.backward(hidden, head, targets, 0.4, 2.0, **given)
    check(lambda v: cross_entropy.forward(v, head, targets, 0.4, 2.0, **given), hidden, smooth)
    factors = np.array([0.5, 0.0, 3.0])
    weighted = cross_entropy.backward(hidden, head, targets, 0.4, 2.0, factors=factors)
    check(lambda v: factors @ cross_entropy.losses(v, head, targets, 0.4, 2.0), hidden, weighted)


@pytest.mark.parametrize("options", [(), (0.4, 2.0)])
def test_trained_rows(options):
    """One matrix looked up and as a head; token 8 is there twice, token 5 nowhere."""
    ids, tokens = np.array([3, 8, 0, 8, 2]), np.array([8, 5, 0])
    weight, rows, hidden, dy = normal(9, 4), normal(3, 4), normal(5, 4), normal(5, 4)
    targets = np.array([3, -100, 8, 0, -100])

    def loss(v):
        whole = trained_rows.overwritten(weight, tokens, v)
        return np.sum(dy * 2.0 * whole[ids]) + cross_entropy.forward(
            hidden, whole, targets, *options
        )

    whole = trained_rows.overwritten(weight, tokens, rows)
    dlogits = cross_entropy.logits_gradient(hidden, whole, targets, *options)
    gradient = trained_rows.head_gradient(dlogits, hidden, tokens, *options[:1])
    check(loss, rows, gradient + trained_rows.lookup_gradient(dy, ids, tokens, 2.0))
    masked = trained_rows.lookup_gradient(dy, ids, tokens, padding=8)
    assert not masked[0].any() and masked[2].any()


@pytest.mark.parametrize("options", [(), (0.4, 2.0)])
def test_a_pair_on_the_head(options):
    hidden, head, a, b = normal(5, 4), normal(9, 4), normal(3, 4), normal(9, 3)
    targets, mask = np.array([3, -100, 8, 0, -100]), linear.dropout_mask(5, 8, 4, 0.3, 11, 22)
    given = {"hidden": hidden, "a": a, "b": b}

    def wide(**changed):
        values = {**given, **changed}
        return head_pair.widened(values["hidden"], head, values["a"], values["b"], 1.7, mask)

    dlogits = cross_entropy.logits_gradient(*wide(), targets, *options)
    gradients = head_pair.backward(dlogits, hidden, head, a, b, 1.7, mask, *options[:1])
    for name, gradient in zip(given, gradients, strict=True):
        check(
            lambda v, name=name: cross_entropy.forward(*wide(**{name: v}), targets, *options),
            given[name],
            gradient,
        )


def test_a_pair_on_the_embedding():
    """Token 8 is there twice; as padding A gets nothing of it, and B does."""
    ids, weight, dy = np.array([3, 8, 0, 8, 2]), normal(9, 4), normal(5, 4)
    given = {"a": normal(3, 9), "b": normal(4, 3)}
    gradients = embedding_pair.backward(dy, ids, *given.values(), 1.7, 3.0)
    for name, gradient in zip(given, gradients, strict=True):

        def loss(v, name=name):
            pair = (given | {name: v}).values()
            return np.sum(dy * embedding_pair.forward(weight, ids, *pair, 1.7, 3.0))

        check(loss, given[name], gradient)
    da, db = embedding_pair.backward(dy, ids, *given.values(), 1.7, 3.0, padding=8)
    assert not da[:, 8].any() and da[:, 3].all() and np.array_equal(db, gradients[1])


@pytest.mark.parametrize("options", [(), (0.4, 2.0)])
def test_a_matrix_that_is_trained_whole(options):
    """Looked up and as a head; token 8 is there twice."""
    ids, targets = np.array([3, 8, 0, 8, 2]), np.array([3, -100, 8, 0, -100])
    weight, hidden, dy = normal(9, 4), normal(5, 4), normal(5, 4)

    def loss(v):
        return np.sum(dy * 2.0 * v[ids]) + cross_entropy.forward(hidden, v, targets, *options)

    dlogits = cross_entropy.logits_gradient(hidden, weight, targets, *options)
    gradient = trained_matrix.head_gradient(dlogits, hidden, *options[:1])
    check(loss, weight, gradient + trained_matrix.lookup_gradient(dy, ids, 9, 2.0))
    masked = trained_matrix.lookup_gradient(dy, ids, 9, padding=8)
    assert not masked[8].any() and masked[0].any()


def test_parts_of_a_dropout():
    x, mask = normal(4, 6), linear.dropout_mask(4, 8, 6, 0.3, 11, 22)
    dys = normal(4, 6), normal(4, 6)

    def summed(v):
        return sum(np.sum(dy * y) for dy, y in zip(dys, dropout.parts(v, mask), strict=True))

    check(summed, x, dropout.backward(*dys, mask))


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_losses_of_pairs(loss_type):
    a, b, counts = normal(7), normal(7), (np.arange(1.0, 8), np.arange(3.0, 10))

    def value(a=a, b=b):
        return float(preference.pairs(loss_type, a, b, counts, 0.4, 0.2).losses.sum())

    made = preference.pairs(loss_type, a, b, counts, 0.4, 0.2)
    check(lambda v: value(a=v), a, made.chosen)
    check(lambda v: value(b=v), b, made.rejected)


def test_losses_of_odds():
    a, b = -np.abs(normal(7)), -np.abs(normal(7))
    made = preference.odds(a, b, 0.4)
    check(lambda v: float(preference.odds(v, b, 0.4).losses.sum()), a, made.chosen)
    check(lambda v: float(preference.odds(a, v, 0.4).losses.sum()), b, made.rejected)


def test_losses_of_single_answers():
    ratios, is_good = normal(9), np.arange(9) % 3 > 0
    given = (is_good, 0.4, 0.3, (1.2, 0.7))
    _, slopes = preference.singles(ratios, *given)
    check(lambda v: float(preference.singles(v, *given)[0].sum()), ratios, slopes)


def test_dropout_mask_keeps_the_right_share():
    mask = linear.dropout_mask(300, 304, 300, 0.25, 5, 6)
    assert set(np.unique(mask)) == {0.0, float(np.float32(1 / 0.75))}
    assert abs((mask == 0).mean() - 0.25) < 0.01
    other = linear.dropout_mask(300, 304, 300, 0.25, 6, 6)
    both = ((mask == 0) & (other == 0)).mean()
    assert abs(both - 0.25**2) < 0.01  # independent


@pytest.mark.parametrize("normalized", [True, False])
def test_experts(normalized):
    x, logits, w, dy = normal(6, 4), normal(6, 5), normal(5, 3, 4), normal(6, 3)
    ids, weights = experts.route(logits, 2, normalized=normalized)

    def value(x=x, logits=logits, w=w):
        again, weights = experts.route(logits, 2, normalized=normalized)
        assert (again == ids).all()
        return float(np.sum(dy * experts.mix(x, again, weights, w)))

    dx, dweights, dw = experts.mix_backward(dy, x, ids, weights, w)
    dlogits = experts.route_backward(dweights, logits, ids, normalized=normalized)
    check(lambda v: value(x=v), x, dx)
    check(lambda v: value(logits=v), logits, dlogits)
    check(lambda v: value(w=v), w, dw)


@pytest.mark.parametrize(
    "rule",
    [
        expert_scores.Rule(True, True, 1e-20, scale=1.7, groups=4, top_groups=2, pairs=True),
        expert_scores.Rule(False, False, scale=3.0, groups=4, top_groups=2),
        expert_scores.Rule(False, True, 0.7, at_least=True),
        expert_scores.Rule(True, True, 0.3),
        expert_scores.Rule(True, False),
    ],
)
def test_expert_scores(rule):
    logits, bias, dweights = normal(9, 8), 0.2 * normal(8), normal(9, 3)
    ids, _ = expert_scores.route(logits, bias, 3, rule)

    def value(logits):
        again, weights = expert_scores.route(logits, bias, 3, rule)
        assert (again == ids).all()
        return float(np.sum(dweights * weights))

    check(value, logits, expert_scores.route_backward(dweights, logits, ids, rule))


def test_head_parts():
    own, common, dy = normal(4, 12), normal(4, 9), normal(4, 14)

    def made(own=own, common=common):
        return head_parts.forward([(common, 0, 4, 3), (own, 6, 1, 4)], 2, 7)

    parts = [(common, 0, 4, 3), (own, 6, 1, 4)]
    dcommon, down = head_parts.backward(dy, parts, 2, 7)
    check(lambda v: np.sum(dy * made(common=v)), common, dcommon)
    check(lambda v: np.sum(dy * made(own=v)), own, down)


def test_row_gate():
    x, gate, dy = normal(6, 4), normal(6, 1), normal(6, 4)
    dx, dgate = row_gate.backward(dy, x, gate)
    check(lambda v: np.sum(dy * row_gate.forward(v, gate)), x, dx)
    check(lambda v: np.sum(dy * row_gate.forward(x, v)), gate, dgate)


def test_dora():
    z, m, norms, dy = normal(4, 5), normal(5), np.abs(normal(5)), normal(4, 5)
    dz, dm = dora.backward(dy, z, m, norms)
    check(lambda v: np.sum(dy * dora.forward(v, m, norms)), z, dz)
    check(lambda v: np.sum(dy * dora.forward(z, v, norms)), m, dm)
    w, a, b = normal(5, 6), normal(2, 6), normal(5, 2)
    assert np.allclose(dora.norm(w, a, b, 0.5), np.linalg.norm(w + 0.5 * b @ a, axis=1))


def test_router_balance():
    """Logits so far apart that no choice changes."""
    layers, mask = [3 * normal(9, 5) for _ in range(2)], np.array([1.0] * 7 + [0.0] * 2)
    gradients = router_balance.backward(layers, 2, mask)
    for i, gradient in enumerate(gradients):
        assert not gradient[7:].any() and np.abs(gradient[:7]).max() > 1e-3

        def loss(v, i=i):
            return router_balance.loss([*layers[:i], v, *layers[i + 1 :]], 2, mask)

        check(loss, layers[i], gradient)


def test_the_loss_of_balanced_experts_is_how_many_a_token_meets():
    logits = np.log(np.eye(4)[[0, 1, 2, 3]] + 1e-9)
    assert abs(router_balance.loss([logits], 1, np.ones(4)) - 1) < 1e-6
    unbalanced = np.log(np.eye(4)[[0, 0, 0, 0]] + 1e-9)
    assert abs(router_balance.loss([unbalanced], 1, np.ones(4)) - 4) < 1e-6
