"""The backward of causal attention on matrix units, with every choice a parameter, as WGSL.

"dq" owns queries and walks keys, "dkdv" owns keys and walks the queries that see them. Both compute
scores and the gradients of weights as products of their own rows and the others'; weights p, and
ds = p · (dp - delta), are the factors of the sums. f16 holds p as 2^14 times as much, and ds as
2^8 times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attention_kernel import HEADS, KV_HEADS

from qlora_wgpu.gpu.matrix import Limits, MatrixShape

P_BITS, DS_BITS = 14, 8
_MOST_ROWS = 256  # of a workgroup
_MOST_REGISTERS = 232 * 32  # of a subgroup, for matrices and loads
_MOST_MATRICES = 256  # loads and products of a turn that are written out

BINDINGS = """@group(0) @binding(1) var<storage, read> q: array<vec4<u32>>; // and dout
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>; // and v
@group(0) @binding(3) var<storage, read> info: array<vec4<f32>>; // log-sum-exps, to base 2; deltas
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;"""


@dataclass(frozen=True)
class Way:
    """One way to write a kernel; by default as the engine's.

    Attributes:
        kind: ``"dq"`` or ``"dkdv"``.
        groups: Subgroups of a workgroup.
        fragments: Products along a strip's own rows.
        shared: Whether two subgroups share a strip: one computes scores, the other the gradients of
            weights, and each half of the results' columns.
        others: Rows of the other side in a turn.
        kept: Whether own rows stay in registers; otherwise they are loaded from storage each turn.
        prefetch: Whether the next turn's rows are loaded into registers before products.
        tiled: Whether the others' rows lie in workgroup memory; otherwise factors are loaded from
            storage.
        padding: Units of 16 bytes at the end of rows in workgroup memory.
        piece: Weights of a row that one invocation processes.
        order: Of workgroups: the longest first, the shortest first, or the longest of all heads.
        per_head: Of dkdv: whether results are of each query head; otherwise a workgroup walks all
            heads that share its keys.
    """

    kind: str = "dq"
    groups: int = 8
    fragments: int = 1
    shared: bool = True
    others: int = 32
    kept: bool = True
    prefetch: bool = True
    tiled: bool = True
    padding: int = 1
    piece: int = 8
    order: str = "longest"
    per_head: bool = False

    @property
    def strips(self) -> int:
        return self.groups // 2 if self.shared else self.groups

    @property
    def mixes(self) -> int:
        return 1 if self.kind == "dq" else 2

    def rows(self, unit: MatrixShape) -> int:
        """Own rows of a workgroup."""
        return self.strips * self.fragments * unit.m

    def threads(self, unit: MatrixShape) -> int:
        return self.groups * unit.threads

    def heads(self) -> int:
        """Along the grid."""
        return KV_HEADS if self.kind == "dkdv" and not self.per_head else HEADS

    def arrays(self, unit: MatrixShape, head: int) -> dict[str, int]:
        """Units of 16 bytes of each array in workgroup memory."""
        found = {
            "tile": 2 * self.others * (head // 8 + self.padding) if self.tiled else 0,
            "scores": 2 * self.rows(unit) * (self.others // 4 + self.padding),
        }
        return {name: units for name, units in found.items() if units}

    def nbytes(self, unit: MatrixShape, head: int) -> int:
        return 16 * sum(self.arrays(unit, head).values())

    def loads(self, unit: MatrixShape, head: int) -> int:
        """Units of 16 bytes of one matrix and turn."""
        return self.others * head // 8 // self.threads(unit)

    def registers(self, unit: MatrixShape, head: int) -> int:
        """Of an invocation: results, own rows, what is loaded ahead, and a turn's own."""
        parts = 2 if self.shared else 1
        area = self.fragments * unit.m
        sums = self.mixes * area * head // parts // unit.threads
        own = area * head // parts // unit.threads if self.kept else 0
        scores = area * unit.n * (1 if self.kept else self.others // unit.n) // unit.threads
        loads = 8 * self.loads(unit, head) if self.prefetch else 0
        return sums + own + scores + loads

    def problem(self, unit: MatrixShape, limits: Limits, head: int) -> str:
        """Why it is not tried; empty if it is."""
        threads, parts, lanes = (
            self.threads(unit),
            2 if self.shared else 1,
            self.others // self.piece,
        )
        if self.kind == "dq" and self.per_head:
            return "always of each head"
        if self.rows(unit) > _MOST_ROWS or self.others % max(unit.n, unit.k):
            return "no whole products"
        if head % max(unit.n * parts, unit.k) or self.groups % parts or self.groups < 2:
            return "no whole products"
        if not 1 <= lanes <= unit.threads or self.rows(unit) * lanes % threads:
            return "rows cannot be divided among invocations"
        if self.tiled and self.others * head // 8 % threads:
            return "invocations do not load alike"
        if self.prefetch and not self.tiled:
            return "nothing to prefetch without tiles"
        if not Limits(threads, self.nbytes(unit, head)).within(limits):
            return "beyond the limits of a workgroup"
        columns = self.others // unit.n * (1 if self.shared else 2)
        if self.fragments * columns * (head // unit.k) > _MOST_MATRICES:
            return "too much code"
        if self.registers(unit, head) * unit.threads > _MOST_REGISTERS:
            return "too many registers"
        return ""

    def fits(self, unit: MatrixShape, seq: int) -> bool:
        return seq % self.rows(unit) == 0 and seq % self.others == 0


def kernel(way: Way, unit: MatrixShape, head: int) -> str:
    """Its WGSL."""
    rows, threads, parts = way.rows(unit), way.threads(unit), 2 if way.shared else 1
    m, n, k = unit.m, unit.n, unit.k
    stride, score_stride = head // 8 + way.padding, way.others // 4 + way.padding
    lanes, units = way.others // way.piece, head // 8
    fragments, depths = range(way.fragments), range(head // k)
    columns = range(head // n // parts)
    pieces, octets = range(rows * lanes // threads), range(way.piece // 8)
    of_keys = way.kind == "dkdv"
    own, other = ("k", "q") if of_keys else ("q", "k")
    sides = ("half",) if way.shared else ("0u", "1u")
    group = HEADS // KV_HEADS
    matrix_left = f"subgroup_matrix_left<f16, {k}, {m}>"
    matrix_right = f"subgroup_matrix_right<f16, {n}, {k}>"
    result = f"subgroup_matrix_result<f32, {n}, {m}>"
    loads = way.loads(unit, head) if way.tiled else 0

    def all_of(template: str, count: int) -> str:
        return "\n".join(template.replace("$i", str(i)) for i in range(count))

    def loaded(declares: str = "") -> str:
        place = "(o0 + load_row_$i) * OTHER_STRIDE + other_at + load_unit_$i"
        return all_of(
            f"{declares}first_$i = {other}[{place}]; "
            f"{declares}second_$i = {other}[other_side + {place}];",
            loads,
        )

    stored = all_of(
        f"tile[load_row_$i * {stride}u + load_unit_$i] = first_$i; "
        f"tile[({way.others}u + load_row_$i) * {stride}u + load_unit_$i] = second_$i;",
        loads,
    )

    def right(name: str, side: str, row: str, unit_at: str, order: str) -> str:
        place = f"{side} * other_side + (o0 + {row}) * OTHER_STRIDE + other_at + {unit_at}"
        memory, width = f"&{other}", "OTHER_STRIDE"
        if way.tiled:
            place = f"({side} * {way.others}u + {row}) * {stride}u + {unit_at}"
            memory, width = "&tile", f"{stride}u"
        return (
            f"let {name} = subgroupMatrixLoad<{matrix_right}, {order}>({memory}, {place}, {width});"
        )

    def left(s: int, f: int, d: int) -> str:
        return (
            f"let left_{s}_{f}_{d} = subgroupMatrixLoad<{matrix_left}, row_major>(&{own}, "
            f"{sides[s]} * own_side + own_at + (strip + {f * m}u) * OWN_STRIDE + {d * k // 8}u, "
            "OWN_STRIDE);"
        )

    # Scores, and gradients of weights.
    scores: list[str] = []
    for s, side in enumerate(sides):
        for c in range(way.others // n):
            scores.append("{")
            # Tint zeroes no matrix in a loop that is declared without a value.
            scores += [f"var score_{f} = {result}();" for f in fragments]
            for d in depths:
                scores.append(
                    "{ " + right("other", side, f"{c * n}u", f"{d * k // 8}u", "col_major")
                )
                scores += [] if way.kept else [left(s, f, d) for f in fragments]
                scores += [
                    f"score_{f} = subgroupMatrixMultiplyAccumulate"
                    f"(left_{s}_{f}_{d}, other, score_{f});"
                    for f in fragments
                ]
                scores.append("}")
            scores += [
                f"subgroupMatrixStore<row_major>(&scores, ({side} * {rows}u + strip + {f * m}u) * "
                f"{score_stride}u + {c * n // 4}u, score_{f}, {score_stride}u);"
                for f in fragments
            ]
            scores.append("}")

    # Weights.
    told = "\n".join(
        f"let {name}_{o}_{h} = info[{side} + (head_of_others * seq + o0) / 4u + "
        f"2u * (lane + {o * lanes}u) + {h}u];"
        for name, side in (("lse", "0u"), ("delta", "info_side"))
        for o in octets
        for h in (0, 1)
    )  # fmt: skip
    weights: list[str] = []
    for i in pieces:
        for o in octets:
            weights.append(f"""{{
            let octet = lane + {o * lanes}u;
            let at = row_{i} * {score_stride}u + 2u * octet;
            let next = at + {rows * score_stride}u;
            let own_row = vec4<u32>(first + row_{i});
            let other_row = o0 + 8u * octet + vec4<u32>(0u, 1u, 2u, 3u);""")
            for h, name in enumerate(("lower", "upper")):
                lse, delta = f"lse_{o}_{h}", f"delta_{o}_{h}"
                seen = f"own_row <= other_row + {4 * h}u"
                if not of_keys:
                    lse, delta = f"vec4<f32>(lse_{i})", f"vec4<f32>(delta_{i})"
                    seen = f"other_row + {4 * h}u <= own_row"
                weights.append(f"""
            var p_{name} = exp2(fma(bitcast<vec4<f32>>(scores[at + {h}u]), vec4<f32>(SCALE),
                {P_BITS}.0 - {lse}));
            if (!is_whole) {{ p_{name} = select(vec4<f32>(0.0), p_{name}, {seen}); }}
            let ds_{name} = p_{name} * ((bitcast<vec4<f32>>(scores[next + {h}u]) - {delta}) *
                {2.0 ** (DS_BITS - P_BITS)!r});""")
            for name, at in (("p", "at"), ("ds", "next"))[0 if of_keys else 1 :]:
                packed = ", ".join(
                    f"pack2x16float({name}_{side}.{pair})"
                    for side in ("lower", "upper") for pair in ("xy", "zw")
                )  # fmt: skip
                weights.append(f"scores[{at} + 1u - octet % 2u] = vec4<u32>({packed});")
            weights.append("}")

    # Sums: of ds and the others' first rows; of p and their second ones.
    mixes = [(0, f"{rows}u + ", "0u"), (1, "", "1u")][: way.mixes]
    half = f"half * {units // 2}u + " if way.shared else ""
    sums = []
    for x, at, side in mixes:
        sums += [
            f"let weight_{x}_{f} = subgroupMatrixLoad<{matrix_left}, row_major>(&scores, "
            f"({at}strip + {f * m}u) * {score_stride}u + kk / 4u + 1u - kk / 8u % 2u, "
            f"{score_stride}u);"
            for f in fragments
        ]
        for c in columns:
            sums.append("{ " + right("value", side, "kk", f"{half}{c * n // 8}u", "row_major"))
            sums += [
                f"mix_{x}_{f}_{c} = subgroupMatrixMultiplyAccumulate"
                f"(weight_{x}_{f}, value, mix_{x}_{f}_{c});"
                for f in fragments
            ]
            sums.append("}")
    every = [(x, f, c) for x, _, _ in mixes for f in fragments for c in columns]
    out_stride = way.heads() * head // 4
    scale_of = (2.0**-DS_BITS / math.sqrt(head), 2.0**-P_BITS)
    o_half = f"half * {head // 8}u + " if way.shared else ""
    results = "\n".join(
        f"subgroupMatrixStore<row_major>(&out, ({x}u * seq + first + strip + {f * m}u) * "
        f"{out_stride}u + head * {head // 4}u + {o_half}{c * n // 4}u, "
        f"subgroupMatrixScalarMultiply(mix_{x}_{f}_{c}, {scale_of[x]!r}), {out_stride}u);"
        for x, f, c in every
    )

    # The walk: its turns are numbered over all heads.
    begin = f"first / {way.others}u * {way.others}u" if of_keys else "0u"
    end = "seq" if of_keys else f"first + {rows + way.others - 1}u"
    walked = group if of_keys and not way.per_head else 1
    first_head = f"head * {walked}u" if of_keys else f"head / {group}u"
    place = f"""let head_of_others = {first_head} + turn_of / turns;
        let o0 = begin + turn_of % turns * {way.others}u;
        let other_at = head_of_others * {units}u;"""
    own_head = f"head / {group}u" if of_keys and way.per_head else "head"
    is_whole = f"o0 >= first + {rows - 1}u" if of_keys else f"o0 + {way.others - 1}u <= first"
    own_info = (
        ""
        if of_keys
        else all_of(
            "let at_$i = head * seq + first + row_$i; let lse_$i = info[at_$i / 4u][at_$i % 4u]; "
            "let delta_$i = info[info_side + at_$i / 4u][at_$i % 4u];",
            len(pieces),
        )
    )
    block = {
        "longest": "let block = blocks(count.x, at.x, true); let head = at.y;",
        "shortest": "let block = blocks(count.x, at.x, false); let head = at.y;",
        "heads": "let block = blocks(count.y, at.y, true); let head = at.x;",
    }[way.order]
    memory = "\n".join(
        f"var<workgroup> {name}: array<vec4<u32>, {size}>;"
        for name, size in way.arrays(unit, head).items()
    )
    fill = f"{loaded('let ')} {stored} workgroupBarrier();" if way.tiled else ""
    ahead, start = "", ""
    if way.prefetch:
        start = f"{{ let turn_of = 0u; {place} {loaded()} }}"
        fill = f"{stored} workgroupBarrier();"
        ahead = f"if (turn + 1u < total) {{ let turn_of = turn + 1u; {place} {loaded()} }}"
    newline = "\n"
    strides = {"q": HEADS * units, "k": KV_HEADS * units}
    return f"""enable f16; enable chromium_experimental_subgroup_matrix;
{BINDINGS}
const OWN_STRIDE = {strides[own]}u;
const OTHER_STRIDE = {strides[other]}u;
const SCALE = {math.log2(math.e) / math.sqrt(head)};
{memory}
fn blocks(count: u32, at: u32, longest: bool) -> u32 {{
    return select(at, count - 1u - at, longest != {str(of_keys).lower()});
}}
@compute @workgroup_size({threads})
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(subgroup_id) group: u32,
    @builtin(subgroup_invocation_id) lane_of_group: u32,
) {{
    {block}
    let seq = count.{"y" if way.order == "heads" else "x"} * {rows}u;
    let own_side = seq * OWN_STRIDE;
    let other_side = seq * OTHER_STRIDE;
    let info_side = seq * {HEADS // 4}u;
    let index = group * {unit.threads}u + lane_of_group;
    let first = block * {rows}u;
    let own_at = first * OWN_STRIDE + {own_head} * {units}u;
    let strip = group / {parts}u * {way.fragments * m}u;
    let half = group % {parts}u;
    let lane = index % {lanes}u;
    let begin = {begin};
    let turns = ({end} - begin) / {way.others}u;
    let total = turns * {walked}u;
    {all_of(f"let row_$i = index / {lanes}u + $iu * {threads // lanes}u;", len(pieces))}
    {own_info}
    {all_of(f"let load_row_$i = (index + $iu * {threads}u) / {units}u;", loads)}
    {all_of(f"let load_unit_$i = (index + $iu * {threads}u) % {units}u;", loads)}
    {all_of("var first_$i: vec4<u32>; var second_$i: vec4<u32>;", loads * way.prefetch)}
    {
        newline.join(left(s, f, d) for s in range(len(sides)) for f in fragments for d in depths)
        if way.kept
        else ""
    }
    {" ".join(f"var mix_{x}_{f}_{c}: {result};" for x, f, c in every)}
    {start}
    for (var turn = 0u; turn < total; turn += 1u) {{
        let turn_of = turn;
        {place}
        let is_whole = {is_whole};
        {fill}
        {ahead}
        {newline.join(scores)}
        {told if of_keys else ""}
        workgroupBarrier();
        {newline.join(weights)}
        workgroupBarrier();
        for (var kk = 0u; kk < {way.others}u; kk += {k}u) {{ {newline.join(sums)} }}
        workgroupBarrier();
    }}
    {results}
}}"""
