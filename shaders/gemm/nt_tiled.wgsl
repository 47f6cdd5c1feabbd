//#if MATRIX
enable f16;
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// As gemm/nt.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. No dropout. Launcher: kernels/gemm.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_tiled.wgsl
//#input 1 x: 8
//#input 2 w: 8
//#input 4 u?: 4 float32
//#input 5 b?: 4 float32

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    let k_units = (params.k + 7u) / 8u;
    for (var i = index; i < TILE_M * TILE_K / 8u; i += THREADS) {
        let m = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let k = k0 / 8u + unit;
        // Rows past the end repeat the last; past the last k there are zeros.
        let value = load_x(min(m0 + m, params.rows - 1u) * params.x_stride + min(k, k_units - 1u));
        put_x(m, 8u * unit, scale8(value, f32(k < k_units)));
    }
    for (var i = index; i < TILE_N * TILE_K / 8u; i += THREADS) {
        let n = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let k = min(k0 / 8u + unit, k_units - 1u);
        put_w_row(n, 8u * unit, load_w(expert * params.w_expert + min(c0 + n, params.columns - 1u) * params.w_stride + k));
    }
}

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    // Units of four are stored up to a whole unit of eight.
    if (row >= row_count() || column >= (params.columns + 7u) / 8u * 8u) {
        return;
    }
    var v = value * params.scale;
//#if u
    let last = params.columns - 1u;
    let r_stride = params.r_stride / 4u;
    //#unroll j 4: let b_$j = adapter_at(expert) + (4u * params.y_unit0 + min(column + $ju, last)) * r_stride;
    for (var k = 0u; k < (params.r + 3u) / 4u; k += 1u) {
        let t = load_u(row * r_stride + k);
        v += vec4<f32>(dot(t, load_b(b_0 + k)), dot(t, load_b(b_1 + k)), dot(t, load_b(b_2 + k)), dot(t, load_b(b_3 + k)));
    }
//#endif
    store4(row, column, v);
}
