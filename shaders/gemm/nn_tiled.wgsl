//#if MATRIX
enable f16;
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// As gemm/nn.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. Launcher: kernels/gemm.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_tiled.wgsl
//#input 1 x: 8
//#input 2 w: 8
//#input 4 u?: 1 float32
//#input 5 a?: 4 float32

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    for (var i = index; i < TILE_M * TILE_K / 8u; i += THREADS) {
        let m = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let k = k0 + 8u * unit;
        // Rows past the end repeat the last; past the last k there are zeros.
        let there = k < params.k;
        let at = params.x_unit0 + select(0u, k / 8u, there);
        put_x(m, 8u * unit, scale8(load_x(min(m0 + m, params.rows - 1u) * params.x_stride + at), f32(there)));
    }
    let units = (params.columns + 7u) / 8u;
    for (var i = index; i < TILE_K * TILE_N / 8u; i += THREADS) {
        let k = i / (TILE_N / 8u);
        let unit = i % (TILE_N / 8u);
        put_w_column(k, 8u * unit, load_w(expert * params.w_expert + min(k0 + k, params.k - 1u) * params.w_stride + min(c0 / 8u + unit, units - 1u)));
    }
}

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    // Units of four are stored up to a whole unit of eight.
    if (row >= row_count() || column >= (params.columns + 7u) / 8u * 8u) {
        return;
    }
    var v = value * params.scale;
//#if u
    var added = vec4<f32>(0.0);
    for (var j = 0u; j < params.r; j += 1u) {
        added += load_u(row * params.r_stride + j) * load_a(adapter_at(expert) + j * params.y_stride + column / 4u);
    }
//#if DROPOUT
    added *= dropout_mask4(row * params.y_stride * 4u + column);
//#endif
    v += added;
//#endif
    store4(below + row, column, v);
}
