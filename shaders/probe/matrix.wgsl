enable f16;
enable chromium_experimental_subgroup_matrix;
// What one product on matrix units gives: result = 2 · left · right, with right read by rows the
// first time and by columns, from a transposed copy, the second. One subgroup. Launcher:
// gpu/probe.py.
@group(0) @binding(1) var<storage, read> left: array<f32>;
@group(0) @binding(2) var<storage, read> right: array<f32>;
@group(0) @binding(3) var<storage, read_write> result: array<f32>;

var<workgroup> left_tile: array<f16, M * K>;
var<workgroup> right_tile: array<f16, K * N>;
var<workgroup> turned_tile: array<f16, K * N>;
var<workgroup> sums: array<f32, M * N>;

@compute @workgroup_size(LANES)
fn main(@builtin(local_invocation_index) lane: u32) {
    for (var i = lane; i < M * K; i += LANES) {
        left_tile[i] = f16(left[i]);
    }
    for (var i = lane; i < K * N; i += LANES) {
        right_tile[i] = f16(right[i]);
        turned_tile[i % N * K + i / N] = f16(right[i]);
    }
    workgroupBarrier();
    var sum: subgroup_matrix_result<f32, N, M>;
    let a = subgroupMatrixLoad<subgroup_matrix_left<f16, K, M>, row_major>(&left_tile, 0u, K);
    let by_rows = subgroupMatrixLoad<subgroup_matrix_right<f16, N, K>, row_major>(&right_tile, 0u, N);
    let by_columns = subgroupMatrixLoad<subgroup_matrix_right<f16, N, K>, col_major>(&turned_tile, 0u, K);
    sum = subgroupMatrixMultiplyAccumulate(a, by_rows, sum);
    sum = subgroupMatrixMultiplyAccumulate(a, by_columns, sum);
    subgroupMatrixStore<row_major>(&sums, 0u, sum, N);
    workgroupBarrier();
    for (var i = lane; i < M * N; i += LANES) {
        result[i] = sums[i];
    }
}
