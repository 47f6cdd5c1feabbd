"""Matrix units in plain WGSL, so that the kernels that use them run on any driver.

A matrix that is loaded is where it lies; sums lie in workgroup memory, and the invocations of a
subgroup share them. f16 is float32 of its precision, which every driver has.
"""

import re

from qlora_wgpu.gpu.matrix import MatrixShape

HALVES = MatrixShape(8, 8, 8, 2)
FLOATS = MatrixShape(8, 8, 8, 4, "f32")

_MAIN = re.compile(
    r", @builtin\(subgroup_id\) subgroup: u32, "
    r"@builtin\(subgroup_invocation_id\) lane: u32([^{]*)\{"
)
_REPLACED = (
    (r"enable (f16|chromium_experimental_subgroup_matrix);", ""),
    (r"var sum_(\d+)_(\d+): subgroup_matrix_result<[^>]*>;",
     r"let sum_\1_\2 = begun(\1u * FRAGMENTS_N + \2u);"),
    (r"subgroupMatrixLoad<subgroup_matrix_(?:left|right)<[^>]*>, row_major>\(&\w+,", "Matrix(0u,"),
    (r"subgroupMatrixLoad<subgroup_matrix_(?:left|right)<[^>]*>, col_major>\(&\w+,", "Matrix(1u,"),
    (r"sum_\w+ = subgroupMatrixMultiplyAccumulate\(", "multiply("),
    (r"subgroupMatrixStore<row_major>\(&results,", "stored("),
    (r"bitcast<vec4<f16>>\(", "halves("),
    (r"-> vec4<f16>", "-> vec4<f32>"),
    (r"vec4<f16>\(", "quantizeToF16("),
    (r"alias Factor = f16;", "alias Factor = f32;"),
)  # fmt: skip
_FUNCTIONS = """
struct Matrix {
    by_columns: u32,
    at: u32,
    stride: u32,
}

const SUMS = MATRIX_M * MATRIX_N;
var<workgroup> sums: array<f32, GROUPS_M * GROUPS_N * FRAGMENTS_M * FRAGMENTS_N * SUMS>;
var<private> own_lane: u32;
var<private> own_group: u32;

fn begun(index: u32) -> u32 {
    let at = (own_group * FRAGMENTS_M * FRAGMENTS_N + index) * SUMS;
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) { sums[at + i] = 0.0; }
    return at;
}

fn multiply(x: Matrix, w: Matrix, at: u32) {
    let down = select(w.stride, 1u, w.by_columns == 1u);
    let across = select(1u, w.stride, w.by_columns == 1u);
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) {
        var sum = sums[at + i];
        for (var k = 0u; k < MATRIX_K; k += 1u) {
            sum += x_tile[x.at + i / MATRIX_N * x.stride + k] * w_tile[w.at + k * down + i % MATRIX_N * across];
        }
        sums[at + i] = sum;
    }
}

fn stored(to: u32, at: u32, stride: u32) {
    for (var i = own_lane; i < SUMS; i += SUBGROUP_SIZE) {
        results[to + i / MATRIX_N * stride + i % MATRIX_N] = sums[at + i];
    }
}

fn halves(v: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(v.x), unpack2x16float(v.y));
}
"""  # noqa: E501


def emulated(code):
    """A shader with matrix units as one without."""
    if "subgroup_matrix" not in code:
        return code
    for pattern, text in _REPLACED:
        code = re.sub(pattern, text, code)
    begun = (
        r"\1{ let subgroup = index / SUBGROUP_SIZE; let lane = index % SUBGROUP_SIZE; "
        "own_group = subgroup; own_lane = lane; "
    )
    return _MAIN.sub(begun, code) + _FUNCTIONS
