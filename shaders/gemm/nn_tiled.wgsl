//#if MATRIX
enable f16;
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// As gemm/nn.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. Launcher: ops/gemm_tiled.py.
//#include common/nn_interface.wgsl
//#include common/weight8.wgsl
//#include common/gemm_store.wgsl
//#if MATRIX
//#include common/tile_matrix.wgsl
//#else
//#include common/tile_f32.wgsl
//#endif

// First row of y that this workgroup's part of k has.
var<private> below: u32;

// Whose rows this workgroup has.
var<private> expert: u32;

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    for (var i = index; i < TILE_M * TILE_K / 8u; i += THREADS) {
        let m = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let k = k0 + 8u * unit;
        // Rows past the end repeat the last; past the last k there are zeros.
        let there = k < params.k;
        let at = params.x_unit0 + select(0u, k / 8u, there);
        let value = x[min(m0 + m, params.rows - 1u) * params.x_stride + at];
        put_x(m, 8u * unit, even8(value) * f32(there), odd8(value) * f32(there));
    }
    let units = (params.columns + 7u) / 8u;
    for (var i = index; i < TILE_K * TILE_N / 8u; i += THREADS) {
        let k = i / (TILE_N / 8u);
        let unit = i % (TILE_N / 8u);
        let value = w[expert * params.w_expert + min(k0 + k, params.k - 1u) * params.w_stride + min(c0 / 8u + unit, units - 1u)];
        put_w_column(k, 8u * unit, weight_even8(value), weight_odd8(value));
    }
}

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    // Units of four are stored up to a whole unit of eight.
    if (row >= row_count() || column >= (params.columns + 7u) / 8u * 8u) {
        return;
    }
    var v = value * params.scale;
//#if LORA
    var added = vec4<f32>(0.0);
    for (var j = 0u; j < params.r; j += 1u) {
        added += u[row * params.r_stride + j] * a[adapter_at(expert) + j * params.y_stride + column / 4u];
    }
//#if DROPOUT
    added *= dropout_mask4(row * params.y_stride * 4u + column);
//#endif
    v += added;
//#endif
    store4(below + row, column, v);
}

@compute @workgroup_size(GROUP)
//#if MATRIX
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
//#else
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
//#endif
    let m0 = group.y * TILE_M;
    if (m0 >= row_count()) {
        return;
    }
    let found = expert_of(m0);
    if (!is_here(found)) {
        return;
    }
    expert = found;
    below = group.z * params.rows;
    let k_first = group.z * params.k_part;
//#if MATRIX
    product(index, subgroup, lane, m0, group.x * TILE_N, k_first, min(params.k, k_first + params.k_part));
//#else
    product(index, m0, group.x * TILE_N, k_first, min(params.k, k_first + params.k_part));
//#endif
}
