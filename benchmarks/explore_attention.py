"""Times causal attention on matrix units in every way that its forward can be written.

usage: python benchmarks/explore_attention.py OUT [--minutes 8] [--seq 1024 4096] [--small]
           [--count N] [--registers FILE]

As explore.py, for heads of 64 and 128 with grouped queries: f16 factors, float32 sums. A matrix's
elements are reachable through workgroup memory only, so there are two schemes. Online, as
shaders/attention/forward_matrix.wgsl: one round over the keys, with weights relative to a reference
of each row. The reference is raised, and the sums rescaled, only in turns where a row's maximum
exceeds it by more than 2^growth; weights are stored as 2^(15 - growth) times as much, so f16 holds
both ends. In two rounds: one finds the log-sum-exps, another computes the scores again, and the
sums.

Results are compared with a plain float32 kernel. Rounding weights to f16 changes a result by at
most 2^-11 · Σ p·|v|; as much again is allowed for the float32 sums of both sides. Log-sum-exps,
which are of exact weights, may differ by 2^-11. Keys for verification contain outliers, so
references grow; keys for timing do not.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import numpy as np
from attention_kernel import BINDINGS, HEADS, HIDDEN, KV_HEADS, Way, kernel
from exploring import Bench, Candidate, Explorer, arguments, explored, in_turns

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

HEAD_DIMS = (64, 128)
ONLINE = (
    Way(groups=4, shared=False, growth=8),
    Way(groups=4, shared=False, growth=8, keys=64, tiles=1),
)
_CHOICES: dict[str, Sequence[Any]] = {
    "groups": (2, 4, 8), "fragments": (1, 2, 4), "shared": (False, True),
    "keys": (16, 32, 64, 128), "growth": (-1, 0, 4, 6, 8), "q_kept": (False, True),
    "prefetch": (False, True), "tiles": (0, 1, 2), "padding": (0, 1), "piece": (8, 16, 32),
    "order": ("last", "plain", "heads"),
}  # fmt: skip


def ways(unit: MatrixShape, limits: Limits, head: int, seed: int = 0) -> list[Way]:
    """Today's first; then each choice alone, of today's and of ``ONLINE``; then drawn ones."""
    alone = [
        replace(first, **{name: value})
        for name, own in _CHOICES.items()
        for value in own
        for first in (Way(), *ONLINE)
    ]
    rng = random.Random(seed)
    drawn = [
        Way(**{name: rng.choice(own) for name, own in _CHOICES.items()}) for _ in range(20_000)
    ]
    found = dict.fromkeys([Way(), *ONLINE, *alone, *drawn])
    return [way for way in found if not way.problem(unit, limits, head)]


PLAIN = """{bindings}
@group(0) @binding(6) var<storage, read_write> sizes: array<f32>; // Σ p·|v|
const D = {head}u;
var<workgroup> shared_: array<f32, D>;
var<workgroup> sums_: array<f32, D>;
fn half_of(word: vec4<u32>, i: u32) -> f32 {{ return unpack2x16float(word[i / 2u])[i % 2u]; }}
@compute @workgroup_size(D)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) own: u32) {{
    let query = at.x;
    let head = at.y;
    let q_at = (query * {heads}u + head) * D / 8u;
    let kv_head = head / {group}u;
    var highest = {hidden};
    var sum = 0.0;
    var total = 0.0;
    var size = 0.0;
    for (var round = 0u; round < 2u; round += 1u) {{
        for (var k0 = 0u; k0 <= query; k0 += D) {{
            let key = k0 + own;
            var score = {hidden};
            if (key <= query) {{
                score = 0.0;
                for (var u = 0u; u < D / 8u; u += 1u) {{
                    let a = q[q_at + u];
                    let b = k[(key * {kv_heads}u + kv_head) * D / 8u + u];
                    for (var i = 0u; i < 4u; i += 1u) {{
                        score += dot(unpack2x16float(a[i]), unpack2x16float(b[i]));
                    }}
                }}
                score *= {scale};
            }}
            if (round == 0u) {{
                let next = max(highest, score);
                sum = sum * exp(highest - next) + exp(score - next) * f32(key <= query);
                highest = next;
                continue;
            }}
            workgroupBarrier();
            shared_[own] = exp(score - highest);
            workgroupBarrier();
            for (var j = 0u; j < min(D, query + 1u - k0); j += 1u) {{
                let v_at = ((k0 + j) * {kv_heads}u + kv_head) * D / 8u;
                let value = half_of(v[v_at + own / 8u], own % 8u);
                total += shared_[j] * value;
                size += shared_[j] * abs(value);
            }}
        }}
        if (round == 0u) {{
            shared_[own] = highest;
            sums_[own] = sum;
            workgroupBarrier();
            for (var i = 0u; i < D; i += 1u) {{ highest = max(highest, shared_[i]); }}
            sum = 0.0;
            for (var i = 0u; i < D; i += 1u) {{ sum += sums_[i] * exp(shared_[i] - highest); }}
            workgroupBarrier();
        }}
    }}
    let index = (query * {heads}u + head) * D + own;
    sizes[index] = size / sum;
    o[index / 4u][index % 4u] = total / sum;
    if (own == 0u) {{ lse[query * {heads}u + head] = highest + log(sum); }}
}}"""
COMPARE = """
struct Params { count: u32, width: u32, bound: f32, other_bound: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> found: array<f32>;
@group(0) @binding(2) var<storage, read> expected: array<f32>;
@group(0) @binding(3) var<storage, read> sizes: array<f32>;
@group(0) @binding(4) var<storage, read_write> wrong: array<atomic<u32>, 2>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
    let i = at.y * params.width + at.x;
    if (i >= params.count) { return; }
    let bound = params.other_bound + params.bound * sizes[min(i, arrayLength(&sizes) - 1u)];
    let share = abs(found[i] - expected[i]) / bound;
    found[i] = bitcast<f32>(0x7fc00000u | params.width); // NaN
    if (!(share <= 1.0)) { atomicAdd(&wrong[0], 1u); }
    atomicMax(&wrong[1], bitcast<u32>(share));
}"""
_BOUND, _LSE_BOUND = 2.0**-10, 2.0**-11
_LEAST = 1e-6  # of a result's bound


# ---- Running it ----------------------------------------------------------------------------------


class Attention:
    """Operands of one length, and what results must be."""

    def __init__(self, bench: Bench, unit: MatrixShape, head: int, seq: int) -> None:
        self.bench, self.unit, self.head, self.seq = bench, unit, head, seq
        self.flops = 4.0 * HEADS * head * seq * (seq + 1) / 2
        rng = np.random.default_rng(head + seq)
        q, k, v = (
            rng.standard_normal((seq, heads, head), np.float32)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.arrays = (
            q.astype(np.float16),
            with_outliers(k).astype(np.float16),
            v.astype(np.float16),
        )
        make = bench.buffer
        self.q, self.k, self.v = map(make, self.arrays)
        self.even_k = make(k.astype(np.float16))
        nothing = np.zeros((seq, HEADS, head), np.float32)
        self.o, self.expected, self.sizes = make(nothing), make(nothing), make(nothing)
        self.lse, self.expected_lse = make(nothing[..., 0]), make(nothing[..., 0])
        self.plain, self.compare = bench.compiled(plain(head)), bench.compiled(COMPARE)
        own = self._operands(self.k) | {4: self.expected, 5: self.expected_lse, 6: self.sizes}
        bench.device.dispatch(self.plain, bench.bound(self.plain, own), (seq, HEADS, 1))

    def _operands(self, k: Any) -> dict[int, Any]:
        return {1: self.q, 2: k, 3: self.v, 4: self.o, 5: self.lse}

    def dispatch(self, way: Way, pipeline: Any, *, verifies: bool) -> Dispatch:
        own = self._operands(self.k if verifies else self.even_k)
        blocks = self.seq // way.rows(self.unit)
        grid = (HEADS, blocks, 1) if way.order == "heads" else (blocks, HEADS, 1)
        return pipeline, self.bench.bound(pipeline, own), grid

    def errors(self, way: Way | None = None) -> dict[str, Any]:
        """How many results are beyond their bound, and the largest error as a share of it."""
        wrong, share = self._compared(self.o, self.expected, self.head, _BOUND, _LEAST)
        wrong_lse, share_lse = self._compared(self.lse, self.expected_lse, 1, 0.0, _LSE_BOUND)
        return {"wrong": wrong + wrong_lse, "share": share, "share_lse": share_lse}

    def _compared(
        self, found: Any, expected: Any, width: int, bound: float, other: float
    ) -> tuple[int, float]:
        bench, count = self.bench, self.seq * HEADS * width
        across = 64 * min(-(-count // 64), 1024)
        values = np.array([count, across], np.uint32).tobytes()
        values += np.array([bound, other], np.float32).tobytes()
        params = bench.buffer(np.frombuffer(values, np.uint32))
        wrong = bench.buffer(np.zeros(2, np.uint32))
        own = {0: params, 1: found, 2: expected, 3: self.sizes, 4: wrong}
        group = bench.bound(self.compare, own)
        bench.device.dispatch(self.compare, group, (across // 64, -(-count // across), 1))
        read = bench.device.read(wrong, 8)
        return int(np.frombuffer(read, np.uint32)[0]), float(np.frombuffer(read, np.float32)[1])


def plain(head: int) -> str:
    """WGSL of the same in float32."""
    return PLAIN.format(
        bindings=BINDINGS, head=head, heads=HEADS, kv_heads=KV_HEADS, group=HEADS // KV_HEADS,
        hidden=HIDDEN, scale=1 / math.sqrt(head),
    )  # fmt: skip


def with_outliers(k: np.ndarray) -> np.ndarray:
    """Keys that are larger the later they come, a few of them, so that maxima grow."""
    outliers = np.ones((len(k), 1, 1), np.float32)
    places = np.arange(5, len(k), 37)
    outliers[places, 0, 0] = np.linspace(1.5, 5.0, len(places))
    return k * outliers


def name_of(way: Way, head: int) -> str:
    return f"attention {head} {' '.join(map(str, asdict(way).values()))}"


def candidates(explorer: Explorer, heads: Sequence[int], seqs: Sequence[int]) -> list[Candidate]:
    """All ways for each size of a head, in turns."""
    unit = explorer.unit
    made = cache(partial(Attention, explorer, unit))
    per_head = [
        [
            Candidate(
                name_of(way, head), f"head of {head}", way, partial(kernel, way, unit, head),
                [
                    [(f"{seq} tokens", partial(made, head, seq))]
                    for seq in seqs if way.fits(unit, seq)
                ],
            )
            for way in ways(unit, explorer.limits, head)
        ]
        for head in heads
    ]  # fmt: skip
    return in_turns(per_head)


def explore(
    description: str | None,
    candidates: Callable[[Explorer, Sequence[int], Sequence[int]], list[Candidate]],
) -> None:
    """Explores kernels of attention, by heads and lengths."""
    begin = time.monotonic()
    parser = arguments(description)
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 1024])
    args = parser.parse_args()
    explorer = Explorer(Device(backend=args.backend))
    heads, seqs = ((32,), [128]) if args.small else (HEAD_DIMS, args.seq)
    explored(args, begin, explorer, candidates(explorer, heads, seqs))


if __name__ == "__main__":
    explore(__doc__, candidates)
