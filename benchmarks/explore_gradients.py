"""Times the backward of causal attention on matrix units in every way that it can be written.

usage: python benchmarks/explore_gradients.py OUT [--minutes 8] [--seq 1024 4096] [--small]
           [--count N] [--registers FILE]

As explore_attention.py: dq, and dk with dv, for heads of 64 and 128 with grouped queries. Rounding
ds to f16 changes a result by at most 2^-11 · Σ |ds|·|x|, and p likewise. Since ds = p · (dp -
delta) is a difference, 2^-10 · Σ p · (|dp| + |delta|) · |x| is allowed, which covers float32 sums.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import numpy as np
from attention_kernel import HEADS, KV_HEADS
from explore_attention import Attention, explore
from exploring import Bench, Candidate, Explorer, in_turns
from gradient_kernel import BINDINGS, Way, kernel

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

KINDS = ("dq", "dkdv")
_CHOICES: dict[str, Sequence[Any]] = {
    "groups": (2, 4, 8), "fragments": (1, 2, 4), "shared": (False, True),
    "others": (16, 32, 64), "kept": (False, True), "prefetch": (False, True),
    "tiled": (False, True), "padding": (0, 1), "piece": (8, 16, 32),
    "order": ("longest", "shortest", "heads"), "per_head": (False, True),
}  # fmt: skip


def ways(unit: MatrixShape, limits: Limits, kind: str, head: int, seed: int = 0) -> list[Way]:
    """Today's first, or the nearest to it; then each choice alone; then drawn ones."""
    today = [Way(kind, groups) for groups in (8, 4)]
    alone = [
        replace(first, **{name: value})
        for name, own in _CHOICES.items()
        for value in own
        for first in (*today, Way(kind, 4, shared=False))
    ]
    rng = random.Random(seed)
    drawn = [
        Way(kind, **{name: rng.choice(own) for name, own in _CHOICES.items()})
        for _ in range(20_000)
    ]
    found = dict.fromkeys([*today, *alone, *drawn])
    return [way for way in found if not way.problem(unit, limits, head)]


PLAIN = """{bindings}
@group(0) @binding(5) var<storage, read_write> sizes: array<vec4<f32>>; // of what is added up
const D = {head}u;
var<workgroup> p_: array<f32, D>;
var<workgroup> ds_: array<f32, D>;
var<workgroup> size_: array<f32, D>;
fn q_of(i: u32, j: u32) -> f32 {{ return unpack2x16float(q[i + j / 8u][j / 2u % 4u])[j % 2u]; }}
fn k_of(i: u32, j: u32) -> f32 {{ return unpack2x16float(k[i + j / 8u][j / 2u % 4u])[j % 2u]; }}
@compute @workgroup_size(D)
fn main(
    @builtin(workgroup_id) at: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) own: u32,
) {{
    let seq = count.x;
    let head = at.y;
    let q_side = seq * {heads}u * D / 8u;
    let k_side = seq * {kv_heads}u * D / 8u;
    let first = select(0u, at.x, {of_keys});
    let last = select(at.x, seq - 1u, {of_keys});
    var sum = vec2<f32>(0.0);
    var size = vec2<f32>(0.0);
    for (var o0 = first; o0 <= last; o0 += D) {{
        let other = min(o0 + own, last);
        let query = select(at.x, other, {of_keys});
        let key = select(other, at.x, {of_keys});
        let q_at = (query * {heads}u + head) * D / 8u;
        let k_at = (key * {kv_heads}u + head / {group}u) * D / 8u;
        var s = 0.0;
        var dp = 0.0;
        for (var j = 0u; j < D; j += 1u) {{
            s += q_of(q_at, j) * k_of(k_at, j);
            dp += q_of(q_side + q_at, j) * k_of(k_side + k_at, j);
        }}
        let i = head * seq + query;
        let delta = info[{heads_4}u * seq + i / 4u][i % 4u];
        let p = exp2(s * {scale} - info[i / 4u][i % 4u]);
        workgroupBarrier();
        p_[own] = p;
        ds_[own] = p * (dp - delta);
        size_[own] = p * (abs(dp) + abs(delta));
        workgroupBarrier();
        for (var j = 0u; j < min(D, last + 1u - o0); j += 1u) {{
            let q_other = ((o0 + j) * {heads}u + head) * D / 8u;
            let k_other = ((o0 + j) * {kv_heads}u + head / {group}u) * D / 8u;
            if ({of_keys}) {{
                let x = vec2<f32>(q_of(q_other, own), q_of(q_side + q_other, own));
                sum += vec2<f32>(ds_[j], p_[j]) * x;
                size += vec2<f32>(size_[j], p_[j]) * abs(x);
            }} else {{
                let x = k_of(k_other, own);
                sum.x += ds_[j] * x;
                size.x += size_[j] * abs(x);
            }}
        }}
    }}
    let i = (at.x * {heads}u + head) * D + own;
    out[i / 4u][i % 4u] = sum.x * {factor};
    sizes[i / 4u][i % 4u] = size.x * {factor};
    if ({of_keys}) {{
        let next = i + seq * {heads}u * D;
        out[next / 4u][next % 4u] = sum.y;
        sizes[next / 4u][next % 4u] = size.y;
    }}
}}"""
COMPARE = """
struct Params {{ count: u32, width: u32, group: u32, head: u32 }}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> found: array<f32>;
@group(0) @binding(2) var<storage, read> expected: array<f32>;
@group(0) @binding(3) var<storage, read> sizes: array<f32>;
@group(0) @binding(4) var<storage, read_write> wrong: array<atomic<u32>, 2>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {{
    let i = at.y * params.width + at.x;
    if (i >= params.count) {{ return; }}
    var sum = 0.0;
    var size = 0.0;
    for (var head = 0u; head < params.group; head += 1u) {{
        let place = (i / params.head * params.group + head) * params.head + i % params.head;
        sum += expected[place];
        size += sizes[place];
    }}
    let share = abs(found[i] - sum) / ({bound} * size + {least});
    found[i] = bitcast<f32>(0x7fc00000u | params.width); // NaN
    if (!(share <= 1.0)) {{ atomicAdd(&wrong[0], 1u); }}
    atomicMax(&wrong[1], bitcast<u32>(share));
}}"""
_BOUND, _LEAST = 2.0**-10, 1e-6


class Gradients:
    """Operands of one kind and length, and what results must be."""

    def __init__(self, bench: Bench, unit: MatrixShape, kind: str, head: int, seq: int) -> None:
        self.bench, self.unit, self.head, self.seq = bench, unit, head, seq
        products, sides = (3, 1) if kind == "dq" else (4, 2)
        self.flops = products * HEADS * head * seq * (seq + 1.0)
        forward = Attention(bench, unit, head, seq)
        q, k, v = forward.arrays
        dout = np.random.default_rng(seq).standard_normal(q.shape, np.float32).astype(np.float16)
        o, lse = (
            np.frombuffer(bench.device.read(buffer, 4 * seq * HEADS * width), np.float32)
            for buffer, width in ((forward.expected, head), (forward.expected_lse, 1))
        )
        delta = np.einsum("shd,shd->hs", o.reshape(q.shape), dout.astype(np.float32))
        info = np.stack([lse.reshape(seq, HEADS).T * math.log2(math.e), delta])
        self.arrays = q, k, v, dout
        nothing = np.zeros((sides, *q.shape), np.float32)
        make = bench.buffer
        self.out, self.expected, self.sizes = make(nothing), make(nothing), make(nothing)
        operands = make(np.stack([q, dout])), make(np.stack([k, v])), make(info.astype(np.float32))
        self.operands = dict(enumerate(operands, 1))
        self.plain = bench.compiled(plain(kind, head))
        self.compare = bench.compiled(COMPARE.format(bound=_BOUND, least=_LEAST))
        own = self.operands | {4: self.expected, 5: self.sizes}
        bench.device.dispatch(self.plain, bench.bound(self.plain, own), (seq, HEADS, 1))

    def dispatch(self, way: Way, pipeline: Any, *, verifies: bool) -> Dispatch:
        blocks, heads = self.seq // way.rows(self.unit), way.heads()
        grid = (heads, blocks, 1) if way.order == "heads" else (blocks, heads, 1)
        return pipeline, self.bench.bound(pipeline, self.operands | {4: self.out}), grid

    def errors(self, way: Way) -> dict[str, Any]:
        """How many results are beyond their bound, and the largest error as a share of it."""
        bench, heads = self.bench, way.heads()
        count = way.mixes * self.seq * heads * self.head
        across = 64 * min(-(-count // 64), 1024)
        params = bench.buffer(np.array([count, across, HEADS // heads, self.head], np.uint32))
        wrong = bench.buffer(np.zeros(2, np.uint32))
        own = {0: params, 1: self.out, 2: self.expected, 3: self.sizes, 4: wrong}
        group = bench.bound(self.compare, own)
        bench.device.dispatch(self.compare, group, (across // 64, -(-count // across), 1))
        read = bench.device.read(wrong, 8)
        share = float(np.frombuffer(read, np.float32)[1])
        return {"wrong": int(np.frombuffer(read, np.uint32)[0]), "share": share}


def plain(kind: str, head: int) -> str:
    """WGSL of the same in float32; results are of each query head."""
    return PLAIN.format(
        bindings=BINDINGS, head=head, heads=HEADS, kv_heads=KV_HEADS, group=HEADS // KV_HEADS,
        heads_4=HEADS // 4, of_keys=str(kind == "dkdv").lower(), factor=1 / math.sqrt(head),
        scale=math.log2(math.e) / math.sqrt(head),
    )  # fmt: skip


def name_of(way: Way, head: int) -> str:
    return f"gradients {head} {' '.join(map(str, asdict(way).values()))}"


def candidates(explorer: Explorer, heads: Sequence[int], seqs: Sequence[int]) -> list[Candidate]:
    """All ways of both kinds for each size of a head, in turns."""
    unit = explorer.unit
    made = cache(partial(Gradients, explorer, unit))
    every = [
        [
            Candidate(
                name_of(way, head), f"{kind}, head of {head}", way,
                partial(kernel, way, unit, head),
                [
                    [(f"{seq} tokens", partial(made, kind, head, seq))]
                    for seq in seqs if way.fits(unit, seq)
                ],
            )
            for way in ways(unit, explorer.limits, kind, head)
        ]
        for head in heads for kind in KINDS
    ]  # fmt: skip
    return in_turns(every)


if __name__ == "__main__":
    explore(__doc__, candidates)
