// common/few_rows.wgsl for software adapters, of matrices of few rows of float32 or operands, such as
// LoRA's A: a workgroup is one subgroup of THREADS, which shares the sums of one row by eight columns,
// each invocation with every THREADS-th unit of them.
//#include common/few_rows.wgsl

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = 8u * place.x;
    let m = place.y;
    let x_at = m * params.x_stride;
    //#unroll j 8: let w_at_$j = min(column + $ju, params.columns - 1u) * params.w_stride;
    //#unroll j 8: var sum_$j = 0.0;
    for (var k = local.x; k < params.units; k += THREADS) {
        let v = load_x(x_at + k);
        //#unroll j 8: sum_$j += tree8(v, load_w(w_at_$j + k));
    }
    //#unroll j 8: let all_$j = subgroupAdd(sum_$j);
    let low = params.scale * vec4<f32>(all_0, all_1, all_2, all_3);
    let high = params.scale * vec4<f32>(all_4, all_5, all_6, all_7);
    if (local.x == 0u) {
        store4(m, column, low);
        store4(m, column + 4u, high);
    }
}
