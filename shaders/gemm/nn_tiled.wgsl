//#if HALF
enable f16;
//#endif
//#if MATRIX
enable chromium_experimental_subgroup_matrix;
//#endif
// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// As gemm/nn.wgsl, for GPUs: a workgroup makes TILE_M × TILE_N results from tiles of x and w in
// its memory, on matrix units (MATRIX) or not. Launcher: kernels/gemm/launch.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_tiled.wgsl
//#input 1 x: 8
//#input 2 w: 8
//#input 4 u?: 4 float32
//#input 5 a?: 4 float32

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    // Units of four are stored up to a whole unit of eight.
    if (row >= row_count() || column >= (params.columns + 7u) / 8u * 8u) {
        return;
    }
    var v = value;
//#if MATRIX
//#if DROPOUT
    // The mask is the term's alone, which so cannot be among the product's steps.
    var added = vec4<f32>(0.0);
    for (var j = 0u; below == 0u && j < params.r; j += 4u) {
        let t = load_u((row * params.r_stride + j) / 4u);
        //#unroll i 4: added += t[$iu] * load_a(a_row(j + $iu) + column / 4u);
    }
    v += added * dropout_mask4(row * params.y_stride * 4u + column);
//#endif
//#endif
    store4(below + row, column, v);
}
//#if u

// Where a row of a begins. Rows past the last meet zeros of u.
fn a_row(j: u32) -> u32 {
    return adapter_at(expert) + min(j, params.r - 1u) * params.y_stride;
}

// Of row j of a, the unit that a column of the results is in.
fn term_unit_w(column: u32, j: u32) -> Eight {
    let at = a_row(j) + min(column, params.columns - 1u) / 8u * 2u;
    return eight(load_a(at), load_a(at + 1u));
}
//#endif
