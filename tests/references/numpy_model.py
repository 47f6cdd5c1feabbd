"""A decoder's own ``trace`` in NumPy: logits in float64, from weights by their files' names.

``NumpyOps`` stands in for ``LayerOps``, so that what is computed is what a family composes, and no
device is asked. Batches are one row without padding.
"""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np

from qlora_wgpu.families.family import find_family
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.moe import SparseMoeBlock, softmax_router
from qlora_wgpu.ops.pointwise import ACTIVATIONS, ClampedGLU
from qlora_wgpu.reference import altup, attention, delta_net, experts, mamba, norms, pointwise


def logits(config, arrays, ids):
    """(seq, vocab_size) float64 logits of one row of ids.

    Raises:
        UnsupportedModelError: If the config.json asks for what is not computed.
        KeyError, ValueError: If the arrays are not those of such a model.
    """
    architecture = find_family(config).read(config)
    decoder, ops = architecture.config, NumpyOps(architecture, arrays, np.asarray(ids))
    layers = tuple(_layer_in_numpy(layer) for layer in decoder.layers)
    hidden = replace(decoder, layers=layers).trace(ops, checkpointing=False)
    head = architecture.embed_name if architecture.tied else architecture.head_name
    result = architecture.logit_scale * hidden @ ops.array(head).T
    if architecture.head_bias:
        result = result + ops.array(architecture.head_bias)
    cap = architecture.logit_softcap
    return result if cap is None else cap * np.tanh(result / cap)


def names(architecture):
    """Every tensor of the model's files and its shape."""
    hidden = (architecture.vocab_size, architecture.hidden_size)
    shapes = {architecture.embed_name: hidden}
    if not architecture.tied:
        shapes[architecture.head_name] = hidden
    for spec in architecture.every_linear:
        shapes[f"{spec.stored}.weight"] = (spec.out_features, spec.in_features)
        if spec.bias:
            shapes[f"{spec.stored}.bias"] = (spec.out_features,)
    shapes |= architecture.tables
    return {**shapes, **architecture.stored_norms, **architecture.router_shapes}


def _as_in_formulas(name):
    """The formulas' name of an activation."""
    kinds = ("silu", "gelu", "relu", "relu2", "quick_gelu", "gelu_new")
    return next(kind for kind in kinds if ACTIVATIONS[kind] == ACTIVATIONS[name])


class NumpyOps(LayerOps):
    """``LayerOps`` on float64 arrays of (tokens, columns)."""

    def __init__(self, architecture, arrays, ids):
        self._architecture, self._arrays, self._ids = architecture, arrays, ids
        self.batch = SimpleNamespace(routers=None, image_rows=None)  # of a step
        self._stored = {spec.name: spec.stored for spec in architecture.linears}

    def array(self, name):
        if "*" not in name:
            return self._arrays[name].astype(np.float64)
        parts = (name.replace("*", str(row)) for row in range(len(self._arrays)))
        return np.stack([self.array(part) for part in parts if part in self._arrays])

    def embedding(self, scale=1.0, noise_scale=1.0):
        return scale * self.array(self._architecture.embed_name)[self._ids]

    def normed_embedding(self, eps):
        return self.plain_rms_norm(self.embedding(), eps)

    def linear(self, x, name, residual=None, *, float32=False, multiplier=1.0):
        name = self._stored.get(name, name)
        y = multiplier * (x @ self.array(f"{name}.weight").T)
        if f"{name}.bias" in self._arrays:
            y = y + self.array(f"{name}.bias")
        return y if residual is None else residual + y

    def group(self, x, names):
        pass

    def router(self, x, name):
        return self.linear(x, name)

    def rms_norm(self, x, name, eps, residual=None, *, float32=False):
        y = self._weight(name) * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return y if residual is None else residual + y

    def plain_rms_norm(self, x, eps, residual=None, *, float32=False):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return y if residual is None else residual + y

    def layer_norm(self, x, name, eps):
        centred = x - x.mean(-1, keepdims=True)
        y = self._weight(name) * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return y + self.array(f"{name}.bias") if f"{name}.bias" in self._arrays else y

    def plain_layer_norm(self, x, eps):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)

    def qk_norm(self, x, name, eps):
        heads = x.reshape(len(x), -1, self._weight(name).shape[-1])
        return self.rms_norm(heads, name, eps).reshape(x.shape)

    def plain_qk_norm(self, x, head_dim, eps):
        heads = x.reshape(len(x), -1, head_dim)
        return (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + eps)).reshape(x.shape)

    def qk_layer_norm(self, x, name, eps):
        weight = self._weight(name)  # of each head, or of all
        heads = x.reshape(len(x), -1 if weight.ndim == 1 else len(weight), weight.shape[-1])
        return self.layer_norm(heads, name, eps).reshape(x.shape)

    def rope(self, x, rotation, head_dim, *, interleaved=False):
        positions = np.arange(len(x))
        table = rotation.angles(positions, np.full(len(x), len(x))).astype(np.float64)
        dim = rotation.rotary_dim
        return attention.rope(x, positions, table, head_dim, dim, interleaved=interleaved)

    def ropes(self, xs, rotation, head_dim, *, interleaved=False):
        return [self.rope(x, rotation, head_dim, interleaved=interleaved) for x in xs]

    def attention(self, q, k, v, head_dim, scale, window=None, softcap=None, sinks=None):
        segments = np.ones((1, len(q)), np.int64)
        sinks = None if sinks is None else self.array(sinks)
        return attention.attention(q, k, v, segments, head_dim, scale, window, softcap, sinks)

    def glu(self, gate, up, name):
        return self.activation(gate, name) * up

    def sparse_glu(self, gate, up, name, deviations):
        return pointwise.sparse_glu(gate, up, _as_in_formulas(name), deviations)

    def tanh(self, x):
        return np.tanh(x)

    def scaled_sum(self, x, y, factor):
        return factor * (x + y)

    def scaled_columns(self, x, name):
        return x * self.array(name)

    def altup_predict(self, h, others, coefs, active):
        return altup.altup_predict(h, others, coefs, active)

    def altup_correct(self, base, predicted, made, gains, active, added=None):
        rest = [j for j in range(gains.shape[1]) if j != active]
        numbers = [active] if base is predicted else rest
        return altup.altup_correct(base, predicted, made, gains, added, numbers=numbers)

    def rms_match(self, x, like, floor, residual=None):
        return altup.rms_match(x, like, floor, residual)

    def stacked(self, xs):
        return np.concatenate(xs)

    def unstacked(self, x, count):
        return np.split(x, count)

    def clamped_glu(self, gate, up, scalars):
        return pointwise.clamped_glu(gate, up, scalars.swiglu_limit, scalars.swiglu_alpha)

    def row_gate(self, x, gate, residual=None):
        y = pointwise.row_gate(x, gate)
        return y if residual is None else residual + y

    def activation(self, x, name):
        return pointwise.activation(x, _as_in_formulas(name))

    def clip(self, x, limit):
        return pointwise.clip(x, limit)

    def xielu(self, x, name):
        leaves = ("alpha_p", "alpha_n", "beta", "eps")
        return pointwise.xielu(x, tuple(self.array(f"{name}.{leaf}").item() for leaf in leaves))

    def scaled(self, x, name):
        return self.array(name).item() * x

    def with_rows(self, x, name, factor, rows_factor):
        table = self.array(name)
        return factor * x + rows_factor * table[np.where(self._ids < len(table), self._ids, 0)]

    def short_conv(self, x, name):
        weight = self.array(f"{name}.weight")[:, 0]
        bias = self.array(f"{name}.bias") if f"{name}.bias" in self._arrays else 0.0
        return delta_net.short_conv(x, weight, bias, np.ones((1, len(x)), np.int64))

    def columns(self, x, first, count):
        return x[:, first : first + count]

    def head_parts(self, parts, heads, head_dim):
        plain = [(part.x, part.group, part.first, part.width) for part in parts]
        return attention.head_parts(plain, heads, head_dim)

    def joined(self, x, y):
        return np.concatenate([x, y], axis=1)

    def operand(self, x):
        return x

    def group_columns(self, x, groups, group, first, widths, *, float32=False):
        return attention.group_columns(x, groups, group, first, widths)

    def sigmoid_gate(self, x, gate):
        return x * pointwise.activation(gate, "sigmoid")

    def causal_conv(self, x, name):
        weight = self.array(f"{name}.weight")[:, 0]
        bias = self.array(f"{name}.bias") if f"{name}.bias" in self._arrays else 0.0
        return delta_net.causal_conv(x, weight, bias, np.ones((1, len(x)), np.int64))

    def gated_delta_gates(self, a, b, at, largest):
        scalars = (self.array(f"{at}{name}") for name in ("A_log", "dt_bias"))
        return delta_net.gated_delta_gates(a, b, *scalars, largest)

    def gated_delta_rule(self, q, k, v, decay, beta, *sizes):
        segments = np.ones((1, len(q)), np.int64)
        return delta_net.gated_delta_rule(q, k, v, decay, beta, segments, delta_net.Heads(*sizes))

    def gated_rms_norm(self, x, z, name, eps):
        return norms.gated_rms_norm(x, z, self._weight(name), eps)

    def column_scale(self, x, factors):
        return x * np.repeat(*zip(*factors, strict=True))

    def mamba_steps(self, raw, at, limits):
        return mamba.mamba_steps(raw, self.array(f"{at}dt_bias"), limits)

    def mamba_scan(self, x, bc, dt, at, heads, state_size):
        frozen = (self.array(f"{at}{leaf}") for leaf in ("A_log", "D"))
        return mamba.mamba_scan(x, bc, dt, *frozen, np.ones((1, len(x)), np.int64), state_size)

    def gated_group_norm(self, x, z, name, eps, groups, gate_first=True):
        weight = self._weight(name)
        return mamba.gated_group_norm(x, z, weight, eps, groups, gate_first=gate_first)

    def _weight(self, name):
        name = f"{name}.weight"
        return self.array(name) + self._architecture.offset_of(name)


class _Experts:
    """A mixture of experts, every expert for every token."""

    def __init__(self, experts):
        self._experts = experts

    def trace(self, ops, x, at, residual, scale):
        of, layer, at = self._experts, at, f"{at}{self._experts.name}."
        residual = 0.0 if residual is None and self._experts.shared is None else residual
        if of.shared is not None:
            residual = of.shared.trace(ops, x, layer, residual, scale)
        router = of.choice or softmax_router(normalized=of.norm_topk_prob)
        scoring = replace(router.scoring, scale=scale * router.scoring.scale)
        named = router.correction is not None
        bias = ops.array(f"{layer}{router.correction}").ravel() if named else 0.0
        scores, top, rule = (
            ops.router(x, f"{at}{of.router}"),
            of.num_experts_per_tok,
            asdict(scoring),
        )
        ids, weights = experts.route_by_scores(scores, bias, top, **rule)
        p = np.zeros((len(x), of.num_experts))
        np.put_along_axis(p, ids, weights, 1)
        if of.latent is not None:
            x = ops.linear(x, at + of.latent.before)
        mixed = 0.0
        for i in range(of.num_experts):
            *wide, down = (f"{at}experts.{i}.{leaf}" for leaf in of.leaves)
            clamped = isinstance(of.activation, ClampedGLU)
            unit = ops.clamped_glu if clamped else ops.glu if len(wide) == 2 else ops.activation
            inner = unit(*(ops.linear(x, name) for name in wide), of.activation)
            mixed = mixed + p[:, i : i + 1] * ops.linear(inner, down)
        return residual + (mixed if of.latent is None else ops.linear(mixed, at + of.latent.after))


class _Beside:
    """A mixture of experts beside an MLP, every expert for every token."""

    def __init__(self, mixture):
        self._mixture = mixture

    def trace(self, ops, h, made, at):
        of, eps = self._mixture, self._mixture.eps
        x = ops.array(f"{at}router.scale") * h / np.sqrt((h * h).mean(-1, keepdims=True) + eps)
        scores = ops.router(x, f"{at}router.proj") / np.sqrt(of.hidden_size)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = np.where(p >= np.sort(p, -1)[:, -of.top_k][:, None], p, 0.0)
        p *= ops.array(f"{at}router.per_expert_scale") / p.sum(-1, keepdims=True)
        x, sparse = ops.rms_norm(h, at + of.before, eps), 0.0
        for i in range(of.num_experts):
            gate, up, down = (f"{at}experts.{i}.{leaf}" for leaf in of.leaves)
            inner = ops.glu(ops.linear(x, gate), ops.linear(x, up), of.activation)
            sparse = sparse + p[:, i : i + 1] * ops.linear(inner, down)
        dense = ops.rms_norm(made, at + of.after_mlp, eps)
        return ops.rms_norm(sparse, at + of.after, eps, dense)


def _layer_in_numpy(layer):
    mixture = getattr(layer, "mixture", None)
    changes = {} if mixture is None else {"mixture": _Beside(mixture)}
    return replace(layer, mlp=_in_numpy(layer.mlp), **changes)


def _in_numpy(mlp):
    return _Experts(mlp) if isinstance(mlp, SparseMoeBlock) else mlp
