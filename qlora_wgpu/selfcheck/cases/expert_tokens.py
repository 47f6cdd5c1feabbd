"""Experts of new tokens: of the chosen ones alone, decoded on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.kernels.common import NEW_TOKENS_TILE
from qlora_wgpu.model.quantized_weights import device_arrays, lay_out, words
from qlora_wgpu.ops.experts import expert_linear
from qlora_wgpu.ops.modules import DenseExperts, ExpertLinear, ExpertMatrix
from qlora_wgpu.ops.routing import combine, permute, route
from qlora_wgpu.reference import experts as experts_reference
from qlora_wgpu.selfcheck.cases.common import each, filled_adapter, normal
from qlora_wgpu.selfcheck.cases.few_rows import new_tokens, stored_weight
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_EXPERTS, _TOP_K = 6, 3


def _experts(run: Runner, form: str, outer: int, inner: int) -> tuple[ExpertMatrix, Array]:
    """Experts of a form, or operands in two shards, and their weights as they are held."""
    if form == "dense":
        w = normal("w", _EXPERTS, outer, inner)
        pieces = tuple(
            (first, count, run.weight(w[first : first + count].reshape(-1, inner)))
            for first, count in ((0, 2), (2, 4))
        )
        return DenseExperts(_EXPERTS, outer, inner, pieces), run.rounded_weight(w)
    stored = [stored_weight(form, outer, inner, number) for number in range(_EXPERTS)]
    whole = Storage("experts", "check", 256)
    matrix, storages = lay_out("w", (outer, inner), stored[0].format, _EXPERTS, whole.part, None)
    for leaf, storage in storages.items():
        each_one = [words(device_arrays(weight)[leaf]) for weight in stored]
        size = storage.nbytes // 4 // _EXPERTS
        storage.data = np.stack([np.pad(a, (0, size - a.size)) for a in each_one])
    return matrix, np.stack([weight.dequantize().astype(np.float64) for weight in stored])


@each(
    ("double", 64, 3, 8, True),
    ("NF4", 72, 9, 5, False),
    ("Q5_K", 256, 1, 0, True),
    ("dense", 36, 2, 3, True),
    ("dense", 40, 1, 0, False),
)
def check_experts_of_new_tokens(
    run: Runner, form: str, inner: int, rows: int, r: int, has_bias: bool
) -> None:
    """Some tokens meet three of six experts each; which there are of a form is in one range."""
    outer, g = 44, run.graph
    stack = ExpertSpec("mlp.experts", "up_proj", _EXPERTS, outer, inner)
    config = LoraConfig(r=max(r, 1), lora_alpha=2 * max(r, 1), target_modules=["up_proj"])
    adapter, parts = filled_adapter(config, [], [stack])
    names = sorted(parts)
    a, b = (np.stack([parts[n] for n in names if leaf in n]) for leaf in ("lora_A", "lora_B"))
    weight, held = _experts(run, form, outer, inner)
    x, logits = normal("x", rows, inner), normal("logits", rows, _EXPERTS)
    skip, bias = normal("skip", rows, outer), normal("bias", _EXPERTS, outer)
    logits = logits.astype(np.float32).astype(np.float64)
    routing = route(g, run.float32(logits), _TOP_K, normalized=True, tile=NEW_TOKENS_TILE)
    layer = ExpertLinear("up", weight, adapter.expert_loras[stack.name] if r else None)
    layer = replace(layer, bias=run.float32(bias) if has_bias else None)
    y = expert_linear(g, permute(g, run.operand(x), routing), layer, routing, new_tokens(rows))
    (got,) = run.run(combine(g, y, routing, run.float32(skip)))
    ids, weights = experts_reference.route(logits, _TOP_K, normalized=True)
    full = held + 2.0 * (r > 0) * (b @ a)
    exact = skip + experts_reference.mix(
        run.rounded(x), ids, weights, full, bias if has_bias else None
    )
    run.compare(got, exact, inner=ROUNDING[run.dtype])
