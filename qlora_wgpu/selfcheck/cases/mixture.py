"""A mixture of experts: routing, the experts' layer, and what comes back."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.ops.experts import expert_linear
from qlora_wgpu.ops.modules import DenseExperts, ExpertLinear
from qlora_wgpu.ops.routing import combine, permute, route
from qlora_wgpu.reference import experts as reference
from qlora_wgpu.selfcheck.cases.common import ONES, ROWS, filled_adapter, normal
from qlora_wgpu.selfcheck.runner import Runner

_EXPERTS, _TOP_K, _INNER, _OUTER = 5, 2, 36, 20
_STACK = ExpertSpec("mlp.experts", "up_proj", _EXPERTS, _OUTER, _INNER)


def _mixture(run: Runner, normalized: bool) -> None:
    x, dy = normal("x", ROWS, _INNER), normal("dy", ROWS, _OUTER)
    logits, skip = normal("logits", ROWS, _EXPERTS), normal("skip", ROWS, _OUTER)
    w = normal("w", _EXPERTS, _OUTER, _INNER)
    config = LoraConfig(r=3, lora_alpha=3, target_modules=["up_proj"])
    adapter, parts = filled_adapter(config, [], [_STACK])
    pieces = ((0, 2, run.operand(w[:2].reshape(-1, _INNER))),
              (2, 3, run.operand(w[2:].reshape(-1, _INNER))))  # fmt: skip
    experts = DenseExperts(_EXPERTS, _OUTER, _INNER, pieces)
    layer = ExpertLinear("up", experts, adapter.expert_loras[_STACK.name])
    g, tx, tlogits = run.graph, run.operand(x, grad=True), run.float32(logits, grad=True)
    routing = route(g, tlogits, _TOP_K, normalized=normalized)
    y = expert_linear(g, permute(g, tx, routing), layer, routing, run.batch(ONES))
    y = combine(g, y, routing, run.float32(skip))
    dx, dlogits = run.gradients(y, run.float32(dy), tx, tlogits)
    got_y, got_dx, got_dlogits, flat = run.run(y, dx, dlogits, adapter.gradient)
    factors = {leaf: np.stack([parts[n] for n in sorted(parts) if leaf in n])
               for leaf in ("lora_A", "lora_B")}  # fmt: skip
    a, b = factors["lora_A"], factors["lora_B"]
    full = run.rounded(w.reshape(-1, _INNER)).reshape(w.shape) + b @ a
    x = run.rounded(x)
    ids, weights = reference.route(logits, _TOP_K, normalized=normalized)
    dx_exact, dweights, dw = reference.mix_backward(dy, x, ids, weights, full)
    run.compare(got_y, reference.mix(x, ids, weights, full) + skip)
    run.compare(got_dx, dx_exact)
    dlogits_exact = reference.route_backward(dweights, logits, ids, normalized=normalized)
    run.compare(got_dlogits, dlogits_exact)
    gradients = adapter.split(flat[0].astype(np.float32))
    names = sorted(gradients)
    for leaf, exact in (
        ("lora_A", np.swapaxes(b, 1, 2) @ dw),
        ("lora_B", dw @ np.swapaxes(a, 1, 2)),
    ):
        run.compare(np.stack([gradients[n] for n in names if leaf in n]).astype(np.float64), exact)


def check_experts(run: Runner) -> None:
    """Checks experts with and without weights that sum up to one."""
    _mixture(run, True)
    _mixture(run, False)
