"""The forward of causal attention on matrix units, with every choice a parameter, as WGSL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlora_wgpu.gpu.matrix import Limits, MatrixShape

HEADS, KV_HEADS = 32, 8
HIDDEN = "-1e30"  # the score of a key that is not seen
_LOWEST = "-1e20"  # reference of a row that has seen no key; above what is hidden
_MOST_ROWS = 256  # of a workgroup
_MOST_REGISTERS = 224 * 32  # of a subgroup, for matrices and loads
_MOST_MATRICES = 256  # loads and products of a turn that are written out
_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)
BINDINGS = """@group(0) @binding(1) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> o: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;"""


@dataclass(frozen=True)
class Way:
    """One way to write the kernel; by default as the engine's.

    Attributes:
        groups: Subgroups of a workgroup.
        fragments: Products along the queries of a strip.
        shared: Whether two subgroups share a strip, half of the scores' and the results' columns
            each; otherwise each has its own.
        keys: Keys of a turn.
        growth: Of online softmax, the exponent by which a maximum may exceed its reference; -1 for
            two rounds.
        q_kept: Whether queries stay in registers as factors; otherwise they are loaded from
            workgroup memory each turn.
        prefetch: Whether the next keys and values are loaded into registers before products.
        tiles: 2: keys and values have a tile each, and the next keys are stored while weights are
            computed; 1: they share one; 0: factors are loaded from storage.
        padding: Units of 16 bytes at the end of rows in workgroup memory.
        piece: Scores of a row that one invocation processes.
        order: Of workgroups: the last queries first, plain, or the last queries of all heads first.
    """

    groups: int = 8
    fragments: int = 1
    shared: bool = True
    keys: int = 32
    growth: int = 6
    q_kept: bool = True
    prefetch: bool = True
    tiles: int = 2
    padding: int = 1
    piece: int = 8
    order: str = "last"

    @property
    def strips(self) -> int:
        return self.groups // 2 if self.shared else self.groups

    def rows(self, unit: MatrixShape) -> int:
        """Queries of a workgroup."""
        return self.strips * self.fragments * unit.m

    def threads(self, unit: MatrixShape) -> int:
        return self.groups * unit.threads

    def arrays(self, unit: MatrixShape, head: int) -> dict[str, int]:
        """Units of 16 bytes of each array in workgroup memory."""
        rows, stride = self.rows(unit), head // 8 + self.padding
        found = {
            "tile": self.tiles * self.keys * stride,
            "scores": rows * (self.keys // 4 + self.padding),
            "scratch": self.groups * unit.m * (unit.n // 4 + 1),
            "q_tile": 0 if self.q_kept else rows * stride,
        }
        return {name: units for name, units in found.items() if units}

    def nbytes(self, unit: MatrixShape, head: int) -> int:
        return 16 * sum(self.arrays(unit, head).values()) + 4 * self.rows(unit) + 8

    def registers(self, unit: MatrixShape, head: int) -> int:
        """Of an invocation: results, queries, what is loaded ahead, and a turn's own."""
        parts = 2 if self.shared else 1
        area = self.fragments * unit.m
        sums = area * head // parts // unit.threads
        queries = area * head // 2 // unit.threads if self.q_kept else 0
        columns = 1 if self.q_kept else self.keys // unit.n // parts
        scores = area * columns * unit.n // unit.threads
        loads = 4 * self.loads(unit, head) * self.tiles if self.prefetch else 0
        return sums + queries + scores + loads

    def loads(self, unit: MatrixShape, head: int) -> int:
        return self.keys * head // 8 // self.threads(unit)

    def problem(self, unit: MatrixShape, limits: Limits, head: int) -> str:
        """Why it is not tried; empty if it is."""
        threads, parts = self.threads(unit), 2 if self.shared else 1
        lanes = self.keys // self.piece
        if self.rows(unit) > _MOST_ROWS or self.keys % max(unit.n * parts, unit.k):
            return "no whole products"
        if head % max(unit.n * parts, unit.k) or self.groups % parts or self.groups < 2:
            return "no whole products"
        if not 1 <= lanes <= unit.threads or self.rows(unit) * lanes % threads:
            return "rows cannot be divided among invocations"
        if self.rows(unit) * lanes // threads > 16:
            return "too many rows of an invocation"
        if self.tiles and self.keys * head // 8 % threads:
            return "invocations do not load alike"
        if not self.tiles and (self.prefetch or not self.q_kept):
            return "nothing to prefetch without tiles"
        if not Limits(threads, self.nbytes(unit, head)).within(limits):
            return "beyond the limits of a workgroup"
        columns = self.keys // unit.n // parts
        if self.fragments * columns * (head // unit.k) > _MOST_MATRICES:
            return "too much code"
        if self.registers(unit, head) * unit.threads > _MOST_REGISTERS:
            return "too many registers"
        return ""

    def fits(self, unit: MatrixShape, seq: int) -> bool:
        return seq % self.rows(unit) == 0 and seq % self.keys == 0


def kernel(way: Way, unit: MatrixShape, head: int) -> str:
    """Its WGSL."""
    rows, threads, parts = way.rows(unit), way.threads(unit), 2 if way.shared else 1
    m, n, k = unit.m, unit.n, unit.k
    online, stride = way.growth >= 0, head // 8 + way.padding
    score_stride, scratch_stride = way.keys // 4 + way.padding, n // 4 + 1
    fragments, depths = range(way.fragments), range(head // k)
    score_columns, columns = range(way.keys // n // parts), range(head // n // parts)
    lanes = way.keys // way.piece
    pieces = range(rows * lanes // threads)
    bits = 15 - way.growth if online else 14  # weights are stored as 2^bits times as much
    v_at = (way.tiles - 1) * way.keys * stride
    matrix_left = f"subgroup_matrix_left<f16, {k}, {m}>"
    matrix_right = f"subgroup_matrix_right<f16, {n}, {k}>"
    result = f"subgroup_matrix_result<f32, {n}, {m}>"
    each = [(f, c) for f in fragments for c in columns]

    def all_of(template: str, count: int) -> str:
        return "\n".join(template.replace("$i", str(i)) for i in range(count))

    # Keys and values: from storage into registers, and from there into the tile.
    loads = way.loads(unit, head) if way.tiles else 0

    def loaded(of: str, turn: str, declares: str = "") -> str:
        source = f"{of}[kv_at + ({turn} + load_row_$i) * KV_STRIDE + load_unit_$i]"
        return all_of(f"{declares}{of}_$i = {source};", loads)

    def stored(of: str) -> str:
        at = v_at if of == "v" else 0
        return all_of(f"tile[{at}u + load_row_$i * {stride}u + load_unit_$i] = {of}_$i;", loads)

    def moved(of: str, turn: str) -> str:
        """Stores what was prefetched, or loads and stores it."""
        return stored(of) if way.prefetch else f"{{ {loaded(of, turn, 'let ')} {stored(of)} }}"

    def right(name: str, of: str, row: str, unit_at: str, order: str) -> str:
        place = f"kv_at + (k0 + {row}) * KV_STRIDE + {unit_at}"
        memory, width = f"&{of}", "KV_STRIDE"
        if way.tiles:
            place = f"{v_at if of == 'v' else 0}u + ({row}) * {stride}u + {unit_at}"
            memory, width = "&tile", f"{stride}u"
        return (
            f"let {name} = subgroupMatrixLoad<{matrix_right}, {order}>({memory}, {place}, {width});"
        )

    def left(f: int, d: int) -> str:
        """A factor of queries."""
        if way.q_kept:
            place, memory, width = f"q_at + (strip + {f * m}u) * Q_STRIDE", "&q", "Q_STRIDE"
        else:
            place, memory, width = f"(strip + {f * m}u) * {stride}u", "&q_tile", f"{stride}u"
        return (
            f"let left_{f}_{d} = subgroupMatrixLoad<{matrix_left}, row_major>"
            f"({memory}, {place} + {d * k // 8}u, {width});"
        )

    # Scores.
    half = f"half * {way.keys // 2}u + " if way.shared else ""
    begin_scores = "var score_{f}_{c} = " + result + "();"  # Tint zeroes no matrix in a loop else
    multiply = "score_{f}_{c} = subgroupMatrixMultiplyAccumulate(left_{f}_{d}, key, score_{f}_{c});"
    store_score = (
        f"subgroupMatrixStore<row_major>(&scores, (strip + {{at}}u) * {score_stride}u + "
        f"({half}{{column}}u) / 4u, score_{{f}}_{{c}}, {score_stride}u);"
    )
    scores: list[str] = []
    pairs = [(f, c) for c in score_columns for f in fragments]

    def column(c: int, d: int) -> str:
        key = right("key", "k", f"{half}{c * n}u", f"{d * k // 8}u", "col_major")
        products = " ".join(multiply.format(f=f, c=c, d=d) for f in fragments)
        return f"{{ {key} {products} }}"

    if way.q_kept:
        for c in score_columns:
            scores += [begin_scores.format(f=f, c=c) for f in fragments]
            scores += [column(c, d) for d in depths]
            scores += [store_score.format(f=f, c=c, at=f * m, column=c * n) for f in fragments]
    else:
        scores += [begin_scores.format(f=f, c=c) for f, c in pairs]
        for d in depths:
            factors = " ".join(left(f, d) for f in fragments)
            scores += [f"{{ {factors}", *(column(c, d) for c in score_columns), "}"]
        scores += [store_score.format(f=f, c=c, at=f * m, column=c * n) for f, c in pairs]
    compute_scores = "{" + "\n".join(scores) + "}"

    # Weights. Lanes of a row are neighbours.
    octets = range(way.piece // 8)
    vectors = [f"{side}_{o}" for o in octets for side in ("lower", "upper")]
    highest = vectors[0]
    for vector in vectors[1:]:
        highest = f"max({highest}, {vector})"

    def across(value: str, operation: str) -> str:
        """Combines a value over a row's lanes."""
        steps = [1 << bit for bit in range(lanes.bit_length() - 1)]
        form = {"max": "{v} = max({v}, {s});", "sum": "{v} += {s};"}[operation]
        return "\n".join(
            form.format(v=value, s=f"subgroupShuffleXor({value}, {step}u)") for step in steps
        )

    def of_row(i: int, *, first_round: bool) -> str:
        """Scores of a piece become weights where they are, or are summed in the first round."""
        lines = []
        for o in octets:
            lines.append(f"""
            let octet_{o} = lane + {o * lanes}u;
            let at_{o} = row_{i} * {score_stride}u + 2u * octet_{o};
            var lower_{o} = bitcast<vec4<f32>>(scores[at_{o}]);
            var upper_{o} = bitcast<vec4<f32>>(scores[at_{o} + 1u]);
            if (!is_whole) {{
                let key = k0 + 8u * octet_{o} + vec4<u32>(0u, 1u, 2u, 3u);
                let query = vec4<u32>(first + row_{i});
                lower_{o} = select(vec4<f32>({HIDDEN}), lower_{o}, key <= query);
                upper_{o} = select(vec4<f32>({HIDDEN}), upper_{o}, key + 4u <= query);
            }}""")
        lines.append(f"let both = {highest};")
        lines.append("var most = SCALE * max(max(both.x, both.y), max(both.z, both.w));")
        if first_round:
            lines.append(f"""most = max(most, reference_{i});
            sum_{i} *= exp2(reference_{i} - most);
            reference_{i} = most;""")
        elif online:
            lines.append(f"""{across("most", "max")}
            factor_{i} = 1.0;
            if (most > reference_{i} + {way.growth}.0) {{
                factor_{i} = exp2(reference_{i} - most);
                reference_{i} = most;
                sum_{i} *= factor_{i};
                atomicStore(&grew[turn % 2u], 1u);
            }}""")
        lines.append(f"let unit = vec4<f32>({0 if first_round else bits}.0 - reference_{i});")
        lines += [f"{name} = exp2(fma({name}, vec4<f32>(SCALE), unit));" for name in vectors]
        if first_round or online:
            lines.append(f"sum_{i} += dot({' + '.join(vectors)}, vec4<f32>(1.0));")
        for o in () if first_round else octets:
            packed = ", ".join(
                f"pack2x16float({side}_{o}.{pair})"
                for side in ("lower", "upper") for pair in ("xy", "zw")
            )  # fmt: skip
            lines.append(f"scores[at_{o} + 1u - octet_{o} % 2u] = vec4<u32>({packed});")
        return "{" + "\n".join(lines) + "}"

    def weighed(first_round: bool) -> str:
        return "\n".join(of_row(i, first_round=first_round) for i in pieces)

    # Of a row: the logarithm to base 2 of its sum, relative to nothing.
    finish = "\n".join(
        f"""{{
        var most = reference_{i};
        {across("most", "max")}
        var sum = sum_{i} * exp2(reference_{i} - most);
        {across("sum", "sum")}
        let logarithm = most + log2(sum){f" - {bits}.0" if online else ""};
        if (lane == 0u) {{
            lse[(first + row_{i}) * HEADS + head] = logarithm * {_LN_2};
            {f"row_scale[row_{i}] = 1.0 / sum;" if online else ""}
        }}
        {"" if online else f"reference_{i} = logarithm;"}
        }}"""
        for i in pieces
    )

    # Sums.
    v_half = f"half * {head // 2 // 8}u + " if way.shared else ""
    p_at = f"(strip + {{at}}u) * {score_stride}u + kk / 4u + 1u - kk / 8u % 2u"
    load_weights = "\n".join(
        f"let weight_{f} = subgroupMatrixLoad<{matrix_left}, row_major>"
        f"(&scores, {p_at.format(at=f * m)}, {score_stride}u);"
        for f in fragments
    )
    add_up = "\n".join(
        "{ "
        + right("value", "v", "kk", f"{v_half}{c * n // 8}u", "row_major")
        + " ".join(
            f"mix_{f}_{c} = subgroupMatrixMultiplyAccumulate(weight_{f}, value, mix_{f}_{c});"
            for f in fragments
        )
        + " }"
        for c in columns
    )
    compute_sums = f"for (var kk = 0u; kk < {way.keys}u; kk += {k}u) {{ {load_weights} {add_up} }}"

    # A matrix through workgroup memory: of a row's elements each gets the row's factor.
    scratch = f"group * {m * scratch_stride}u"
    element = (
        f"let scratch_row = i / {n // 4}u; "
        f"let scratch_at = {scratch} + scratch_row * {scratch_stride}u + i % {n // 4}u;"
    )

    def through(f: int, c: int, what: str) -> str:
        return f"""
        subgroupMatrixStore<row_major>(&scratch, {scratch}, mix_{f}_{c}, {scratch_stride}u);
        workgroupBarrier();
        for (var i = own; i < {m * n // 4}u; i += {unit.threads}u) {{ {element} {what} }}
        workgroupBarrier();"""

    scaled = (
        "scratch[scratch_at] = bitcast<vec4<u32>>"
        "(bitcast<vec4<f32>>(scratch[scratch_at]) * row_scale[strip + {at}u + scratch_row]);"
    )
    rescale = (
        all_of("if (lane == 0u) { row_scale[row_$i] = factor_$i; }", len(pieces))
        + "\nworkgroupBarrier();\n"
        + "\n".join(
            through(f, c, scaled.format(at=f * m))
            + f"\nmix_{f}_{c} = subgroupMatrixLoad<{result}, row_major>"
            f"(&scratch, {scratch}, {scratch_stride}u);"
            for f, c in each
        )
    )
    o_half = f"half * {head // 2 // 4}u + " if way.shared else ""
    scale = "row_scale[strip + {at}u + scratch_row]" if online else f"{2.0**-bits!r}"
    results = "\n".join(
        through(
            f, c,
            f"o[(first + strip + {f * m}u + scratch_row) * HEADS * {head // 4}u + head * "
            f"{head // 4}u + {o_half}{c * n // 4}u + i % {n // 4}u] = "
            f"bitcast<vec4<f32>>(scratch[scratch_at]) * {scale.format(at=f * m)};",
        )
        for f, c in each
    )  # fmt: skip

    ready = (
        "if (workgroupUniformLoad(&grew[turn % 2u]) > 0u && k0 > 0u) {" + rescale + "}"
        if online
        else "workgroupBarrier();"
    )
    reset = "if (index == 0u) { atomicStore(&grew[(turn + 1u) % 2u], 0u); }" if online else ""

    def walk(first_round: bool) -> str:
        """A round over the keys."""
        sums = "" if first_round else compute_sums
        wait = "workgroupBarrier();" if first_round else ready
        clear = "" if first_round else reset
        is_whole = f"let is_whole = k0 + {way.keys - 1}u <= first;"
        next_k = f"min(k0 + {way.keys}u, last - {way.keys}u)"
        head_of = f"""
    turn = 0u;
    for (var k0 = 0u; k0 < last; k0 += {way.keys}u) {{
        {is_whole}"""
        if way.tiles == 2:
            ahead = loaded("k", next_k) if way.prefetch else ""
            if way.prefetch and not first_round:
                ahead += "\n" + loaded("v", "k0")
            values = "" if first_round else moved("v", "k0")
            begin = loaded("k", "0u") if way.prefetch else ""
            end = "workgroupBarrier();" if way.shared and not first_round else ""
            return f"""
    {begin}
    {moved("k", "0u")}
    workgroupBarrier();
    {head_of}
        {ahead}
        {clear}
        {compute_scores}
        workgroupBarrier();
        {moved("k", next_k)}
        {values}
        {weighed(first_round)}
        {wait}
        {sums}
        {end}
        turn += 1u;
    }}
    workgroupBarrier();"""
        if way.tiles == 1:
            begin = loaded("k", "0u") if way.prefetch else ""
            values = loaded("v", "k0") if way.prefetch and not first_round else ""
            following = loaded("k", next_k) if way.prefetch else ""
            store_values = "" if first_round else moved("v", "k0")
            end = "" if first_round else "workgroupBarrier();"
            return f"""
    {begin}
    {head_of}
        {moved("k", "k0")}
        workgroupBarrier();
        {values}
        {clear}
        {compute_scores}
        workgroupBarrier();
        {store_values}
        {following}
        {weighed(first_round)}
        {wait}
        {sums}
        {end}
        turn += 1u;
    }}"""
        end = "workgroupBarrier();" if way.shared and not first_round else ""
        return f"""
    {head_of}
        {clear}
        {compute_scores}
        workgroupBarrier();
        {weighed(first_round)}
        {wait}
        {sums}
        {end}
        turn += 1u;
    }}
    workgroupBarrier();"""

    rounds = walk(False) + finish if online else walk(True) + finish + walk(False)
    block = {
        "last": "let block = count.x - 1u - at.x; let head = at.y;",
        "plain": "let block = at.x; let head = at.y;",
        "heads": "let block = count.y - 1u - at.y; let head = at.x;",
    }[way.order]
    q_tile = (
        f"""for (var i = index; i < {rows * head // 8}u; i += {threads}u) {{
        q_tile[i / {head // 8}u * {stride}u + i % {head // 8}u] =
            q[q_at + i / {head // 8}u * Q_STRIDE + i % {head // 8}u];
    }}
    workgroupBarrier();"""
        if not way.q_kept
        else "\n".join(left(f, d) for f in fragments for d in depths)
    )
    memory = "\n".join(
        f"var<workgroup> {name}: array<vec4<u32>, {units}>;"
        for name, units in way.arrays(unit, head).items()
    )
    state = (
        ""
        if not online
        else f"""var<workgroup> row_scale: array<f32, {rows}>;
var<workgroup> grew: array<atomic<u32>, 2>;"""
    )
    begin = "if (index < 2u) { atomicStore(&grew[index], 0u); }\n" if online else ""
    begin += all_of(
        f"let row_$i = index / {lanes}u + $iu * {threads // lanes}u; "
        f"var reference_$i = {_LOWEST}; var sum_$i = 0.0; var factor_$i = 1.0;",
        len(pieces),
    )
    begin += all_of(
        f"let load_row_$i = (index + $iu * {threads}u) / {head // 8}u; "
        f"let load_unit_$i = (index + $iu * {threads}u) % {head // 8}u;",
        loads,
    )
    prefetched = all_of("var k_$i: vec4<u32>; var v_$i: vec4<u32>;", loads * way.prefetch)
    return f"""enable f16; enable chromium_experimental_subgroup_matrix;
{BINDINGS}
const KV_STRIDE = {KV_HEADS * head // 8}u;
const HEADS = {HEADS}u;
const Q_STRIDE = {HEADS * head // 8}u;
const SCALE = {_LOG2_E / math.sqrt(head)};
{memory}
{state}
@compute @workgroup_size({threads})
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(subgroup_id) group: u32,
    @builtin(subgroup_invocation_id) own: u32,
) {{
    {block}
    let index = group * {unit.threads}u + own;
    let first = block * {rows}u;
    let q_at = first * Q_STRIDE + head * {head // 8}u;
    let kv_at = head / {HEADS // KV_HEADS}u * {head // 8}u;
    let last = (first + {rows + way.keys - 1}u) / {way.keys}u * {way.keys}u;
    let strip = group / {parts}u * {way.fragments * m}u;
    let half = group % {parts}u;
    let lane = index % {lanes}u;
    var turn = 0u;
    {begin}
    {prefetched}
    {q_tile}
    {" ".join(f"var mix_{f}_{c}: {result};" for f, c in each)}
    {rounds}
    workgroupBarrier();
    {results}
}}"""
