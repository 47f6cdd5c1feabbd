//#if MATRIX
enable f16;
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// As gemm/nt.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. No dropout. Launcher: ops/gemm_tiled.py.
//#include common/nt_interface.wgsl
//#include common/weight8.wgsl
//#include common/gemm_store.wgsl
//#if MATRIX
//#include common/tile_matrix.wgsl
//#else
//#include common/tile_f32.wgsl
//#endif

// Whose rows this workgroup has.
var<private> expert: u32;

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    for (var i = index; i < TILE_M * TILE_K / 8u; i += THREADS) {
        let m = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let k = k0 / 8u + unit;
        // Rows past the end repeat the last; past the last k there are zeros.
        let value = x[min(m0 + m, params.rows - 1u) * params.x_stride + min(k, params.k_units - 1u)];
        let there = f32(k < params.k_units);
        put_x(m, 8u * unit, even8(value) * there, odd8(value) * there);
    }
    for (var i = index; i < TILE_N * TILE_K / 8u; i += THREADS) {
        let n = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let k = min(k0 / 8u + unit, params.k_units - 1u);
        let value = w[expert * params.w_expert + min(c0 + n, params.columns - 1u) * params.w_stride + k];
        put_w_row(n, 8u * unit, weight_even8(value), weight_odd8(value));
    }
}

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    // Units of four are stored up to a whole unit of eight.
    if (row >= row_count() || column >= (params.columns + 7u) / 8u * 8u) {
        return;
    }
    var v = value * params.scale;
//#if LORA
    let last = params.columns - 1u;
    //#unroll j 4: let b_$j = adapter_at(expert) + (4u * params.y_unit0 + min(column + $ju, last)) * params.r_stride;
    for (var k = 0u; k < params.r_units; k += 1u) {
        let uu = u[row * params.r_stride + k];
        v += vec4<f32>(dot(uu, b[b_0 + k]), dot(uu, b[b_1 + k]), dot(uu, b[b_2 + k]), dot(uu, b[b_3 + k]));
    }
//#endif
    store4(row, column, v);
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
//#if MATRIX
    product(index, subgroup, lane, m0, group.x * TILE_N, 0u, 8u * params.k_units);
//#else
    product(index, m0, group.x * TILE_N, 0u, 8u * params.k_units);
//#endif
}
