"""Matrix units in plain WGSL, so that the kernels that use them run on any driver.

A matrix that is loaded is where it lies; sums lie in workgroup memory, and the invocations of a
subgroup share them. f16 is float32 of its precision, which every driver has.
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


def emulated(code):
    """A shader with matrix units as one without."""
    if "subgroup_matrix" not in code:
        return code
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
