"""Times products on matrix units in every way that their kernel can be written.

usage: python benchmarks/explore.py OUT [--minutes 8] [--rows 1024 4096] [--small] [--count N]
           [--registers FILE]

y[m, n] = Σ_k x[m, k] · w[n, k] of f16, added up in float32, at the shapes of 1B and 8B. Ways are
drawn in an order that any beginning of covers well, compiled in parallel, compared to the bit with
a plain kernel, and timed on a card that is kept busy. OUT.jsonl gets a row for each, so a later
call goes on where this one was cut off; at the end come the ten best and the worst of each shape.
With --small, shapes are so small that a software GPU with matrix units (Mesa 26) tries all of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from exploring import Bench, Candidate, Explorer, arguments, explored

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import Limits, MatrixShape

SHAPES = ((4096, 4096), (14336, 4096), (2048, 2048), (8192, 2048), (2048, 8192))
"""Columns and depth: 8B's attention and gate or up; 1B's attention, gate or up and down."""
SMALL_SHAPES = ((256, 256), (512, 512))
BLOCK = 64  # weights of a scale
_CODES = np.array([-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7], np.float32)
_MOST_SUMS, _MOST_STAGED = 128, 64  # 4-byte registers of an invocation
_FEW_WORKGROUPS = 264  # two for each core of the largest card: with fewer, sums are cut


# ---- Ways to write the kernel --------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to write the kernel.

    Attributes:
        groups_m: Subgroups of a workgroup along rows.
        groups_n: Along columns.
        fragments_m: Products of a subgroup along rows.
        fragments_n: Along columns.
        steps: Products along the depth of a tile in workgroup memory.
        rolled: Whether the loop over those has an end that no compiler knows.
        stages: 0: tiles are loaded, stored, multiplied; 1: the next one is loaded into registers
            while one is multiplied; 2: and stored into a second tile, with one barrier a turn.
        words: Four-byte words that are stored at once, 2 or 4.
        padding: Such units at the end of a tile's row, so that rows lie in other banks.
        order: Of workgroups: along rows, columns, or in bands of eight tiles' rows.
        parts: Into which sums are cut, for more workgroups.
        adds: Whether sums begin with a residual.
        turned: Whether w is (depth, columns), as in the backward.
        decodes: Whether w is in 4-bit codes, which are decoded into the tile.
    """

    groups_m: int = 2
    groups_n: int = 4
    fragments_m: int = 4
    fragments_n: int = 2
    steps: int = 4
    rolled: bool = True
    stages: int = 1
    words: int = 4
    padding: int = 1
    order: str = "rows"
    parts: int = 1
    adds: bool = False
    turned: bool = False
    decodes: bool = False

    def tile(self, unit: MatrixShape) -> tuple[int, int, int]:
        """Rows, columns and depth of a workgroup's tile."""
        return (
            self.groups_m * self.fragments_m * unit.m,
            self.groups_n * self.fragments_n * unit.n,
            self.steps * unit.k,
        )

    def threads(self, unit: MatrixShape) -> int:
        return self.groups_m * self.groups_n * unit.threads

    def strides(self, unit: MatrixShape) -> tuple[int, int]:
        """Units of ``words`` between the rows of the tiles of x and w."""
        _, columns, depth = self.tile(unit)
        across = columns if self.turned else depth
        return depth // (2 * self.words) + self.padding, across // (2 * self.words) + self.padding

    def tile_units(self, unit: MatrixShape) -> tuple[int, int]:
        """Units of both tiles."""
        rows, columns, depth = self.tile(unit)
        x_stride, w_stride = self.strides(unit)
        return rows * x_stride, (depth if self.turned else columns) * w_stride

    def problem(self, unit: MatrixShape, limits: Limits) -> str:
        """Why it is not tried; empty if it is."""
        rows, columns, depth = self.tile(unit)
        threads = self.threads(unit)
        if self.decodes and (self.turned or BLOCK % 8):
            return "codes lie along the depth"
        copies = 2 if self.stages == 2 else 1
        nbytes = 4 * self.words * copies * sum(self.tile_units(unit))
        if not Limits(threads, nbytes).within(limits):
            return "beyond the limits of a workgroup"
        if self.groups_m * self.groups_n < 2:
            return "of a single subgroup"
        if (rows * depth // 8) % threads or (columns * depth // 8) % threads:
            return "invocations do not load alike"
        sums = self.fragments_m * self.fragments_n * unit.m * unit.n // unit.threads
        staged = 4 * (rows + columns) * depth // 8 // threads if self.stages else 0
        if sums > _MOST_SUMS or staged > _MOST_STAGED:
            return "too many registers"
        return ""

    def fits(self, unit: MatrixShape, rows: int, columns: int, depth: int) -> bool:
        """Whether it computes a product of these sizes, and should."""
        own = self.tile(unit)
        whole = not (rows % own[0] or columns % own[1] or depth % (self.parts * own[2]))
        few = (rows // own[0]) * (columns // own[1]) < _FEW_WORKGROUPS
        return whole and (self.parts == 1 or few)


def ways(unit: MatrixShape, limits: Limits, seed: int = 0) -> list[Way]:
    """Those worth trying, today's first; then each choice alone; then drawn ones."""
    choices: dict[str, Sequence[Any]] = {
        "steps": (1, 2, 4, 8), "rolled": (False, True), "stages": (0, 1, 2), "words": (2, 4),
        "padding": (0, 1), "order": ("rows", "columns", "bands"), "parts": (1, 2, 4),
        "adds": (False, True), "turned": (False, True), "decodes": (False, True),
    }  # fmt: skip
    sizes = (1, 2, 4, 8)
    tiles: list[dict[str, Any]] = [
        dict(zip(("groups_m", "groups_n", "fragments_m", "fragments_n"), each, strict=True))
        for each in product(sizes, repeat=4)
    ]
    first = Way()
    alone = [replace(first, **{name: v}) for name, own in choices.items() for v in own]
    alone += [replace(first, **tile) for tile in tiles]
    rng = random.Random(seed)
    drawn = [
        Way(**rng.choice(tiles), **{name: rng.choice(own) for name, own in choices.items()})
        for _ in range(20_000)
    ]
    found = dict.fromkeys([first, *alone, *drawn])
    return [way for way in found if not way.problem(unit, limits)]


# ---- The kernel ----------------------------------------------------------------------------------


def kernel(way: Way, unit: MatrixShape) -> str:
    """Its WGSL."""
    rows, columns, depth = way.tile(unit)
    threads, (x_stride, w_stride) = way.threads(unit), way.strides(unit)
    x_units, w_units = way.tile_units(unit)
    x_loads, w_loads = rows * depth // 8 // threads, columns * depth // 8 // threads
    w_across = columns // 8 if way.turned else depth // 8
    per = 2 * way.words
    copies = 2 if way.stages == 2 else 1
    each = [(i, j) for i in range(way.fragments_m) for j in range(way.fragments_n)]
    result = f"subgroup_matrix_result<f32, {unit.n}, {unit.m}>"
    place = [
        f"part_at + (m0 + m + {i * unit.m}u) * params.columns4 + "
        f"(n0 + n + {j * unit.n}u) / 4u" for i, j in each
    ]  # fmt: skip

    def put(of: str, i: int, at: str, units: int) -> str:
        to = f"{of}_tile[turn * {units}u + {at}"
        if way.words == 4:
            return f"{to}] = {of}_{i};"
        return f"{to}] = {of}_{i}.xy; {to} + 1u] = {of}_{i}.zw;"

    def places(count: int, across: int) -> list[tuple[str, str]]:
        """The row and the unit of eight in it of what an invocation loads."""
        units = (f"(index + {i * threads}u)" for i in range(count))
        return [(f"{unit} / {across}u", f"{unit} % {across}u") for unit in units]

    x_places, w_places = places(x_loads, depth // 8), places(w_loads, w_across)
    put_all = "\n".join(
        put(of, i, f"{row} * {stride}u + {column} * {8 // per}u", units)
        for of, own, stride, units in (
            ("x", x_places, x_stride, x_units), ("w", w_places, w_stride, w_units),
        )
        for i, (row, column) in enumerate(own)
    )  # fmt: skip

    def load_all(declare: str, k: str) -> str:
        lines = [
            f"{declare}x_{i} = x[(m0 + {row}) * params.depth8 + {k} / 8u + {column}];"
            for i, (row, column) in enumerate(x_places)
        ]
        for i, (row, column) in enumerate(w_places):
            here = f"(n0 + {row}) * params.depth8 + {k} / 8u + {column}"
            if way.turned:
                here = f"({k} + {row}) * (params.columns4 / 2u) + n0 / 8u + {column}"
            value = f"decoded({here})" if way.decodes else f"w[{here}]"
            lines.append(f"{declare}w_{i} = {value};")
        return "\n".join(lines)

    def factor(name: str, kind: str, order: str, at: str, stride: int) -> str:
        of = name[0]
        units = x_units if of == "x" else w_units
        return (
            f"let {name} = subgroupMatrixLoad<{kind}, {order}>"
            f"(&{of}_tile, turn * {units}u + {at}, {stride}u);"
        )

    end = "min(params.steps, STEPS)" if way.rolled else "STEPS"
    left_kind = f"subgroup_matrix_left<f16, {unit.k}, {unit.m}>"
    right_kind = f"subgroup_matrix_right<f16, {unit.n}, {unit.k}>"
    along, order = f"s * {unit.k // per}u", "row_major" if way.turned else "col_major"
    left = "\n".join(
        factor(
            f"x_factor_{i}", left_kind, "row_major", f"(m + {i * unit.m}u) * {x_stride}u + {along}",
            x_stride,
        )
        for i in range(way.fragments_m)
    )  # fmt: skip
    right = "\n".join(
        factor(
            f"w_factor_{j}", right_kind, order,
            f"s * {unit.k * w_stride}u + (n + {j * unit.n}u) / {per}u"
            if way.turned
            else f"(n + {j * unit.n}u) * {w_stride}u + {along}",
            w_stride,
        )
        for j in range(way.fragments_n)
    )  # fmt: skip
    multiply = "\n".join(
        f"sum_{i}_{j} = subgroupMatrixMultiplyAccumulate(x_factor_{i}, w_factor_{j}, sum_{i}_{j});"
        for i, j in each
    )
    next_k = f"min(k0 + {depth}u, k_last - {depth}u)"
    ahead = f"if (s == 0u) {{ {load_all('', next_k)} }}" if way.stages else ""
    compute = f"for (var s = 0u; s < {end}; s += 1u) {{ {ahead}\n{left}\n{right}\n{multiply} }}"
    if way.stages == 2:
        loop = f"""
    {load_all("var ", "k_first")}
    {{ const turn = 0u; {put_all} }}
    workgroupBarrier();
    var turn = 0u;
    for (var k0 = k_first; k0 < k_last; k0 += {depth}u) {{
        {compute}
        turn = 1u - turn;
        {put_all}
        workgroupBarrier();
    }}"""
    elif way.stages == 1:
        loop = f"""
    const turn = 0u;
    {load_all("var ", "k_first")}
    for (var k0 = k_first; k0 < k_last; k0 += {depth}u) {{
        {put_all}
        workgroupBarrier();
        {compute}
        workgroupBarrier();
    }}"""
    else:
        loop = f"""
    const turn = 0u;
    for (var k0 = k_first; k0 < k_last; k0 += {depth}u) {{
        {load_all("let ", "k0")}
        {put_all}
        workgroupBarrier();
        {compute}
        workgroupBarrier();
    }}"""
    begin = "\n".join(
        f"var sum_{i}_{j}: {result};"
        + (
            f" sum_{i}_{j} = subgroupMatrixLoad<{result}, row_major>"
            f"(&residual, {at}, params.columns4);"
            if way.adds
            else ""
        )
        for (i, j), at in zip(each, place, strict=True)
    )
    store = "\n".join(
        f"subgroupMatrixStore<row_major>(&y, {at}, sum_{i}_{j}, params.columns4);"
        for (i, j), at in zip(each, place, strict=True)
    )
    tiles = {
        "rows": "let tm = id % down; let tn = id / down;",
        "columns": "let tn = id % across; let tm = id / across;",
        "bands": "let band = id / (8u * across); let high = min(8u, down - 8u * band); "
        "let inside = id % (8u * across); let tm = 8u * band + inside % high; "
        "let tn = inside / high;",
    }[way.order]
    weights = (
        f"""@group(0) @binding(2) var<storage, read> codes: array<u32>;
@group(0) @binding(5) var<storage, read> scales: array<f32>;
fn decoded(at: u32) -> vec4<u32> {{
    let eight = codes[at];
    let scale = scales[at / {BLOCK // 8}u];
    var out: vec4<u32>;
    for (var i = 0u; i < 4u; i += 1u) {{
        let low = f32((eight >> (8u * i)) & 15u) - 8.0;
        let high = f32((eight >> (8u * i + 4u)) & 15u) - 8.0;
        out[i] = pack2x16float(scale * vec2<f32>(low, high));
    }}
    return out;
}}"""
        if way.decodes
        else "@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;"
    )
    residual = (
        "@group(0) @binding(4) var<storage, read> residual: array<vec4<f32>>;" if way.adds else ""
    )
    return f"""enable f16; enable chromium_experimental_subgroup_matrix;
struct Params {{ rows: u32, columns4: u32, depth8: u32, steps: u32 }}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
{weights}
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;
{residual}
const STEPS = {way.steps}u;
var<workgroup> x_tile: array<vec{way.words}<u32>, {copies * x_units}>;
var<workgroup> w_tile: array<vec{way.words}<u32>, {copies * w_units}>;
@compute @workgroup_size({threads})
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_id) group: u32,
) {{
    let down = params.rows / {rows}u;
    let across = 4u * params.columns4 / {columns}u;
    let id = at.x;
    {tiles}
    let m0 = tm * {rows}u;
    let n0 = tn * {columns}u;
    let part_at = at.y * params.rows * params.columns4;
    let k_part = 8u * params.depth8 / {way.parts}u;
    let k_first = at.y * k_part;
    let k_last = k_first + k_part;
    let m = group / {way.groups_n}u * {way.fragments_m * unit.m}u;
    let n = group % {way.groups_n}u * {way.fragments_n * unit.n}u;
    {begin}
    {loop}
    {store}
}}"""


PLAIN = """
struct Params { rows: u32, columns4: u32, depth8: u32, steps: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
    var sum = 0.0;
    for (var k = 0u; k < params.depth8; k += 1u) {
        let a = x[at.y * params.depth8 + k];
        let b = w[at.x * params.depth8 + k];
        for (var i = 0u; i < 4u; i += 1u) {
            sum += dot(unpack2x16float(a[i]), unpack2x16float(b[i]));
        }
    }
    y[at.y * 4u * params.columns4 + at.x] = sum;
}"""
COMPARE = """
struct Params { count: u32, parts: u32, adds: u32, width: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<storage, read> expected: array<f32>;
@group(0) @binding(3) var<storage, read_write> wrong: array<atomic<u32>>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
    let i = at.y * params.width + at.x;
    if (i >= params.count) { return; }
    var sum = 0.0;
    for (var part = 0u; part < params.parts; part += 1u) {
        sum += y[part * params.count + i];
        y[part * params.count + i] = bitcast<f32>(0x7fc00000u | params.width); // NaN
    }
    if (!(sum == expected[i] * f32(1u + params.adds * params.parts))) { atomicAdd(&wrong[0], 1u); }
}"""


# ---- Running it ----------------------------------------------------------------------------------


class Weights:
    """w of one shape, small integers times powers of two, in all its forms."""

    def __init__(self, bench: Bench, columns: int, depth: int) -> None:
        rng = np.random.default_rng(columns + depth)
        codes = rng.integers(0, 16, (columns, depth), np.uint8)
        scales = 2.0 ** rng.integers(-1, 2, (columns, depth // BLOCK)).astype(np.float32)
        w = (_CODES[codes].reshape(columns, -1, BLOCK) * scales[..., None]).astype(np.float16)
        w = w.reshape(columns, depth)
        self.rows, self.turned = bench.buffer(w), bench.buffer(np.ascontiguousarray(w.T))
        self.codes, self.scales = (
            bench.buffer(codes[:, 0::2] | codes[:, 1::2] << 4),
            bench.buffer(scales),
        )


class Product:
    """One product's operands, and what it must be: sums that are exact."""

    def __init__(
        self, bench: Bench, unit: MatrixShape, w: Weights, rows: int, columns: int, depth: int
    ) -> None:
        self.bench, self.unit, self.w = bench, unit, w
        self.rows, self.columns, self.depth = rows, columns, depth
        self.flops = 2.0 * rows * columns * depth
        x = np.random.default_rng(rows).integers(-2, 3, (rows, depth), np.int8).astype(np.float16)
        make = bench.buffer
        self.x, self.expected = make(x), make(np.zeros((rows, columns), np.float32))
        few = rows * columns <= 2048 * 4096
        self.y = make(np.full((4 if few else 1, rows, columns), np.nan, np.float32))
        self.params = make(np.array([rows, columns // 4, depth // 8, 1 << 20], np.uint32))
        plain, self.compare = bench.compiled(PLAIN), bench.compiled(COMPARE)
        own = {0: self.params, 1: self.x, 2: w.rows, 3: self.expected}
        bench.device.dispatch(plain, bench.bound(plain, own), (columns // 8, rows // 8, 1))

    def dispatch(self, way: Way, pipeline: Any, *, verifies: bool) -> Dispatch:
        own = {
            0: self.params,
            1: self.x,
            2: self.w.turned if way.turned else self.w.rows,
            3: self.y,
        }
        if way.decodes:
            own |= {2: self.w.codes, 5: self.w.scales}
        if way.adds:
            own[4] = self.expected
        rows, columns, _ = way.tile(self.unit)
        tiles = (self.rows // rows) * (self.columns // columns)
        return pipeline, self.bench.bound(pipeline, own), (tiles, way.parts, 1)

    def errors(self, way: Way) -> dict[str, Any]:
        """How many results are wrong; they are NaN afterwards."""
        device, count = self.bench.device, self.rows * self.columns
        width = 64 * min(-(-count // 64), 1024)
        values = np.array([count, way.parts, way.adds, width], np.uint32)
        params, found = self.bench.buffer(values), self.bench.buffer(np.zeros(1, np.uint32))
        own = {0: params, 1: self.y, 2: self.expected, 3: found}
        group = self.bench.bound(self.compare, own)
        device.dispatch(self.compare, group, (width // 64, -(-count // width), 1))
        return {"wrong": int(np.frombuffer(device.read(found, 4), np.uint32)[0])}


def name_of(way: Way) -> str:
    return f"product {' '.join(map(str, asdict(way).values()))}"


def kind_of(way: Way) -> str:
    return "w of 4 bits" if way.decodes else "w turned" if way.turned else "w"


def candidates(
    explorer: Explorer,
    found: Sequence[Way],
    heights: Sequence[int],
    shapes: Sequence[tuple[int, int]],
) -> list[Candidate]:
    """All ways that fit any of the sizes; the first shape decides for each number of rows."""
    unit = explorer.unit
    weights = cache(partial(Weights, explorer))
    made = cache(lambda rows, *shape: Product(explorer, unit, weights(*shape), rows, *shape))
    every = []
    for way in found:
        groups = [
            [
                (f"{rows}x{shape[0]}x{shape[1]}", partial(made, rows, *shape))
                for shape in shapes
                if way.fits(unit, rows, *shape)
            ]
            for rows in heights
        ]
        source = partial(kernel, way, unit)
        every.append(Candidate(name_of(way), kind_of(way), way, source, groups))
    return [candidate for candidate in every if any(candidate.sizes)]


def main() -> None:
    begin = time.monotonic()
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    args = parser.parse_args()
    explorer = Explorer(Device(backend=args.backend))
    shapes, heights = (SMALL_SHAPES, [256]) if args.small else (SHAPES, args.rows)
    found = ways(explorer.unit, explorer.limits)
    explored(args, begin, explorer, candidates(explorer, found, heights, shapes))


if __name__ == "__main__":
    main()
