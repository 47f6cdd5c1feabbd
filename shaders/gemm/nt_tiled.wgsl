//#if HALF
enable f16;
//#endif
//#if MATRIX
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// As gemm/nt.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. No dropout. Launcher: kernels/gemm/launch.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_tiled.wgsl
//#input 1 x: 8
//#input 2 w: 8
//#input 4 u?: 4 float32
//#input 5 b?: 4 float32

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    // Units of four are stored up to a whole unit of eight.
    if (row >= row_count() || column >= (params.columns + 7u) / 8u * 8u) {
        return;
    }
    store4(below + row, column, value);
}
//#if u

// A unit of the row of b that belongs to a column of the results.
fn term_unit_w(column: u32, unit: u32) -> Eight {
    let row = params.row0 + min(column, params.columns - 1u);
    let at = adapter_at(expert) + row * (params.b_stride / 4u) + 2u * unit;
    return eight(load_b(at), load_b(at + 1u));
}
//#endif
