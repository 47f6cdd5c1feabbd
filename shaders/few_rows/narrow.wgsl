// common/few_rows.wgsl for software adapters, of matrices of few rows of float32 or operands, such as
// LoRA's A: a workgroup is one subgroup of THREADS, which shares the sums of ROWS rows by eight columns,
// each invocation with every THREADS-th unit of them.
//#include common/few_rows.wgsl

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = 8u * place.x;
    let m0 = place.y * ROWS;
    //#unroll i ROWS: let x_at_$i = min(m0 + $iu, params.rows - 1u) * params.x_stride;
    //#unroll j 8: let w_at_$j = min(column + $ju, params.columns - 1u) * params.w_stride;
    //#unroll i ROWS, j 8: var sum_$i_$j = 0.0;
    for (var k = local.x; k < params.units; k += THREADS) {
        //#unroll j 8: let w_$j = load_w(w_at_$j + k);
        //#unroll i ROWS
            let x_$i = load_x(x_at_$i + k);
            //#unroll j 8: sum_$i_$j += tree8(x_$i, w_$j);
        //#end
    }
    //#unroll i ROWS
        //#unroll j 8: let all_$i_$j = subgroupAdd(sum_$i_$j);
        let low_$i = params.scale * vec4<f32>(all_$i_0, all_$i_1, all_$i_2, all_$i_3);
        let high_$i = params.scale * vec4<f32>(all_$i_4, all_$i_5, all_$i_6, all_$i_7);
        if (local.x == 0u && m0 + $iu < params.rows) {
            store4(m0 + $iu, column, low_$i);
            store4(m0 + $iu, column + 4u, high_$i);
        }
    //#end
}
