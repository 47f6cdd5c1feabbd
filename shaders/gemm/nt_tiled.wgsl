//#if HALF
enable f16;
//#endif
//#if MATRIX
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// As gemm/nt.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. No dropout. Launcher: kernels/gemm/launching.py.
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
//#if MATRIX
    var v = value * params.scale;
//#if u
    //#unroll j 4: let b_$j = b_row(column + $ju);
    for (var k = 0u; below == 0u && k < (params.r + 3u) / 4u; k += 1u) {
        let t = load_u(row * (params.r_stride / 4u) + layer_of(column) * (params.r / 4u) + k);
        v += vec4<f32>(dot(t, load_b(b_0 + k)), dot(t, load_b(b_1 + k)), dot(t, load_b(b_2 + k)), dot(t, load_b(b_3 + k)));
    }
//#endif
    store4(below + row, column, v);
//#else
    store4(below + row, column, value);
//#endif
}
//#if u

// Where the row of b begins that belongs to a column of the results.
fn b_row(column: u32) -> u32 {
    return adapter_at(expert) + (params.row0 + min(column, params.columns - 1u)) * (params.b_stride / 4u);
}

fn b_unit(column: u32, unit: u32) -> Eight {
    let at = b_row(column) + 2u * unit;
    return eight(load_b(at), load_b(at + 1u));
}
//#endif
