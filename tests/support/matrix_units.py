"""Matrix units in plain WGSL, so that the kernels that use them run on any driver.

In products, a matrix that is loaded is where it lies; sums lie in workgroup memory, and the
invocations of a subgroup share them. In attention, whose workgroup memory is used over and over,
each invocation has what is loaded, and its share of the sums. f16 is float32 of its precision,
which every driver has.
"""

import re

from qlora_wgpu.gpu.matrix import MatrixShape

HALVES = MatrixShape(8, 8, 8, 8)
FLOATS = MatrixShape(8, 8, 8, 8, "f32")

_MAIN = re.compile(
    r", @builtin\(subgroup_id\) subgroup: u32, "
    r"@builtin\(subgroup_invocation_id\) lane: u32([^{]*)\{"
)
_REPLACED = (
    (r"enable (f16|chromium_experimental_subgroup_matrix);", ""),
    (r"var sum_(\d+)_(\d+): subgroup_matrix_result<[^>]*>;",
     r"let sum_\1_\2 = begun(\1u * FRAGMENTS_N + \2u);"),
    (r"(sum_\w+) = subgroupMatrixLoad<subgroup_matrix_result<[^>]*>, row_major>\(&(\w+),",
     r"loaded_\2(\1,"),
    (r"subgroupMatrixLoad<subgroup_matrix_(?:left|right)<[^>]*>, row_major>\(&\w+,", "Matrix(0u,"),
    (r"subgroupMatrixLoad<subgroup_matrix_(?:left|right)<[^>]*>, col_major>\(&\w+,", "Matrix(1u,"),
    (r"sum_\w+ = subgroupMatrixMultiplyAccumulate\(", "multiply("),
    (r"sum_\w+ = subgroupMatrixScalarMultiply\(", "scale("),
    (r"subgroupMatrixScalarMultiply\((sum_\w+), (.*?)\), y_stride", r"\1, \2, y_stride"),
    (r"subgroupMatrixStore<row_major>\(&(y|results),", r"stored_\1("),
    (r"alias Factor = f16;", "alias Factor = f32;"),
)  # fmt: skip
_FUNCTIONS = """
struct Matrix {
    by_columns: u32,
    at: u32,
    stride: u32,
}

const SUMS = MATRIX_M * MATRIX_N / 4u;
const ACROSS = MATRIX_N / 4u;
var<workgroup> sums: array<vec4<f32>, GROUPS_M * GROUPS_N * FRAGMENTS_M * FRAGMENTS_N * SUMS>;
var<private> own_lane: u32;
var<private> own_group: u32;

fn begun(index: u32) -> u32 {
    let at = (own_group * FRAGMENTS_M * FRAGMENTS_N + index) * SUMS;
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) { sums[at + i] = vec4<f32>(0.0); }
    return at;
}

fn multiply(x: Matrix, w: Matrix, at: u32) {
    let down = select(w.stride * VECTOR, 1u, w.by_columns == 1u);
    let across = select(1u, w.stride * VECTOR, w.by_columns == 1u);
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) {
        var sum = sums[at + i];
        for (var k = 0u; k < MATRIX_K; k += 1u) {
            let f = x_factor((x.at + i / ACROSS * x.stride) * VECTOR + k);
            let first = w.at * VECTOR + k * down + i % ACROSS * 4u * across;
            sum += f * vec4<f32>(w_factor(first), w_factor(first + across), w_factor(first + 2u * across), w_factor(first + 3u * across));
        }
        sums[at + i] = sum;
    }
}

fn scale(at: u32, factor: f32) {
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) { sums[at + i] *= factor; }
}

fn stored_results(to: u32, at: u32, stride: u32) {
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) {
        results[to + i / ACROSS * stride + i % ACROSS] = sums[at + i];
    }
}
"""  # noqa: E501
_DIRECT = """
fn stored_y(to: u32, at: u32, factor: f32, stride: u32) {
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) {
        y[to + i / ACROSS * stride + i % ACROSS] = sums[at + i] * factor;
    }
}
"""
_LOADED = """
fn loaded_{0}(at: u32, first: u32, stride: u32) {{
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) {{
        sums[at + i] = {0}[first + i / ACROSS * stride + i % ACROSS];
    }}
}}
"""
_HALF = "return unpack2x16float({0}_tile[i / 8u][i % 8u / 2u])[i % 2u];"
_FLOAT = "return {0}_tile[i / 4u][i % 4u];"


_IN_ATTENTION = (
    (r"enable (f16|chromium_experimental_subgroup_matrix);", ""),
    (r"var (\w+): subgroup_matrix_result<[^>]*>;", r"var \1 = Sums();"),
    (r"subgroup_matrix_result<[^>]*>\(\)", "Sums()"),
    (r"subgroupMatrixLoad<subgroup_matrix_result<[^>]*>, row_major>\(&memory,", "loaded("),
    (r"subgroupMatrixLoad<subgroup_matrix_left<[^>]*>, row_major>\(&memory,", "left_factor("),
    (r"subgroupMatrixLoad<subgroup_matrix_right<[^>]*>, row_major>\(&memory,", "right_factor("),
    (r"subgroupMatrixLoad<subgroup_matrix_right<[^>]*>, col_major>\(&memory,", "turned_factor("),
    (r"subgroupMatrixMultiplyAccumulate\(", "multiplied("),
    (r"subgroupMatrixStore<row_major>\(&memory,", "stored("),
    (r"alias Factor = f16;", "alias Factor = f32;"),
)
_ATTENTION_FUNCTIONS = """
var<private> own_lane: u32;

// What no compiler knows, so that it does not write loops out. Were it of parameters alone, Mesa
// would compile the shader anew, for seconds, for each of their values. It ends all loops of an
// invocation after 65,535 turns together.
fn opaque(count: u32) -> u32 {
    return select(count, 0u, params.rows + own_lane == 0xffffffffu);
}

fn fours_of(i: u32, across: u32) -> vec4<f32> {
    if (across == 1u) {
        return factors(i);
    }
    return vec4<f32>(
        factor_of(i), factor_of(i + across), factor_of(i + 2u * across), factor_of(i + 3u * across)
    );
}

fn right_factor(at: u32, stride: u32) -> Right {
    return Right(at * VECTOR, stride * VECTOR, 1u);
}

fn turned_factor(at: u32, stride: u32) -> Right {
    return Right(at * VECTOR, 1u, stride * VECTOR);
}

struct Right { at: u32, down: u32, across: u32 }

// All of its bits are ones, which an addition to them makes a zero.
fn nvidias_nan(bits: vec4<u32>) -> vec4<u32> {
    let is_nan = (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
    return select(bits, vec4<u32>(0x7fffffffu), is_nan);
}
"""
_HALF_OF_MEMORY = "return unpack2x16float(memory[i / 8u][i % 8u / 2u])[i % 2u];"
_HALVES_OF_MEMORY = (
    "let eight = memory[i / 8u]; let four = select(eight.xy, eight.zw, i % 8u == 4u); "
    "return vec4<f32>(unpack2x16float(four.x), unpack2x16float(four.y));"
)
_FLOATS_OF_MEMORY = "return bitcast<vec4<f32>>(memory[i / 4u]);"
_FLOAT_OF_MEMORY = "return bitcast<f32>(memory[i / 4u][i % 4u]);"


def _emulated_attention(code):
    """An invocation has some fours of a product's results, and their rows of left factors."""
    for pattern, text in _IN_ATTENTION:
        code = re.sub(pattern, text, code)
    names = ("MATRIX_M", "MATRIX_N", "MATRIX_K", "SUBGROUP_SIZE")
    m, n, k, size = (int(re.search(rf"const {name} = (\d+)u;", code)[1]) for name in names)
    fours, parts, across = range(m * n // 4 // size), range(k // 4), n // 4
    place = {i: f"((own_lane + {i * size}u) / {across}u)" for i in fours}
    column = {i: f"((own_lane + {i * size}u) % {across}u)" for i in fours}
    held = ", ".join(f"x_{i}_{p}: vec4<f32>" for i in fours for p in parts)
    loaded = ", ".join(
        f"factors((at + {place[i]} * stride) * VECTOR + {4 * p}u)" for i in fours for p in parts
    )
    code += f"struct Sums {{ {', '.join(f's_{i}: vec4<f32>' for i in fours)} }}\n"
    code += f"struct Left {{ {held} }}\n"
    code += f"fn left_factor(at: u32, stride: u32) -> Left {{ return Left({loaded}); }}\n"
    code += "fn multiplied(x: Left, w: Right, begun: Sums) -> Sums { var sums = begun;\n"
    code += "for (var j = 0u; j < opaque(MATRIX_K); j += 1u) {\n"
    for i in fours:
        part = f"x.x_{i}_0"
        for other in parts[1:]:
            part = f"select({part}, x.x_{i}_{other}, j >= {4 * other}u)"
        code += f"let four_{i} = w.at + j * w.down + {column[i]} * 4u * w.across;\n"
        code += f"sums.s_{i} += {part}[j % 4u] * fours_of(four_{i}, w.across);\n"
    code += "}\n"
    code += "return sums; }\nfn stored(to: u32, sums: Sums, stride: u32) {\n"
    for i in fours:
        at = f"to + {place[i]} * stride + {column[i]}"
        code += f"memory[{at}] = nvidias_nan(bitcast<vec4<u32>>(sums.s_{i}));\n"
    code += "}\n"
    sums = ", ".join(f"floats(at + {place[i]} * stride + {column[i]})" for i in fours)
    code += f"fn loaded(at: u32, stride: u32) -> Sums {{ return Sums({sums}); }}\n"
    begun = (
        r"\1{ let subgroup = index / SUBGROUP_SIZE; let lane = index % SUBGROUP_SIZE; "
        "own_lane = lane; "
    )
    element = _HALF_OF_MEMORY if "const VECTOR = 8u" in code else _FLOAT_OF_MEMORY
    four = _HALVES_OF_MEMORY if element == _HALF_OF_MEMORY else _FLOATS_OF_MEMORY
    code += f"fn factor_of(i: u32) -> f32 {{ {element} }}"
    code += f"fn factors(i: u32) -> vec4<f32> {{ {four} }}"
    return _MAIN.sub(begun, code) + _ATTENTION_FUNCTIONS


def emulated(code):
    """A shader with matrix units as one without."""
    if "subgroup_matrix" not in code:
        return code
    if "&memory" in code:
        return _emulated_attention(code)
    for pattern, text in _REPLACED:
        code = re.sub(pattern, text, code)
    seen = ", @builtin(subgroup_size) size: u32, @builtin(num_subgroups) subgroups: u32"
    told = "let size = SUBGROUP_SIZE; let subgroups = GROUPS_M * GROUPS_N; " if seen in code else ""
    code = code.replace(seen, "")
    begun = (
        r"\1{ let subgroup = index / SUBGROUP_SIZE; let lane = index % SUBGROUP_SIZE; "
        f"own_group = subgroup; own_lane = lane; {told}"
    )
    element = _HALF if "alias Vector = vec4<u32>" in code else _FLOAT
    code += "".join(f"fn {n}_factor(i: u32) -> f32 {{ {element.format(n)} }}" for n in "xw")
    code += _DIRECT if "stored_y(" in code else ""
    code += "".join(_LOADED.format(n) for n in ("y", "residual") if f"loaded_{n}(" in code)
    return _MAIN.sub(begun, code) + _FUNCTIONS
