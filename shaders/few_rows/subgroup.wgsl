// common/few_rows.wgsl for software adapters: a workgroup is one subgroup of THREADS and makes ROWS
// rows by 4 · THREADS columns. Invocations load SPAN units of x, one each, and broadcast them.
//#include common/few_rows.wgsl

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = 4u * (place.x * THREADS + local.x);
    let m0 = place.y * ROWS;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    // No invocation leaves alone: a broadcast needs all of them. Those past the end repeat the last.
    //#unroll i ROWS: let x_at_$i = min(m0 + $iu, params.rows - 1u) * params.x_stride + local.x % SPAN;
//#if DENSE
    //#unroll j 4: let w_at_$j = expert * params.w_expert + min(column + $ju, params.columns - 1u) * params.w_stride;
//#else
    begin_values(local.x, THREADS);
    let layer = layer_of(min(column, params.columns - 1u));
    let begin = part_of(layer, 0u, params.begin1, params.begin2);
    let matrix = layer + expert;
    //#unroll j 4
        let row_$j = min(column + $ju, params.columns - 1u) - begin + 4u * params.y_unit0;
        let codes_at_$j = codes_of_row(matrix, row_$j);
    //#end
//#endif
    //#unroll i ROWS: var acc_$i = vec4<f32>(0.0);
    for (var k = 0u; k < params.units; k += SPAN) {
        //#unroll i ROWS: let x_$i = load_x(x_at_$i + k);
//#if !DENSE
        var scale = vec4<f32>(0.0);
        var minimum = vec4<f32>(0.0);
        //#unroll j 4: var codes_$j = vec4<u32>(0u);
//#endif
        //#unroll s SPAN
//#if DENSE
            //#unroll j 4: let w_$s_$j = load_w(w_at_$j + k + $su);
            //#unroll i ROWS
                let v_$s_$i = broadcast_x_$s(x_$i);
                acc_$i += vec4<f32>(tree8(v_$s_$i, w_$s_0), tree8(v_$s_$i, w_$s_1), tree8(v_$s_$i, w_$s_2), tree8(v_$s_$i, w_$s_3));
            //#end
//#else
            if ($su % SCALED == 0u) {
                //#unroll j 4
                    let block_$j = block_at(row_$j, k + $su);
                    scale[$j] = block_scale(matrix, block_$j);
                    minimum[$j] = block_minimum(matrix, block_$j);
                //#end
            }
            if ($su % CHUNK == 0u) {
                //#unroll j 4: codes_$j = chunk_at(codes_at_$j, k + $su);
            }
            //#unroll j 4: let w_$s_$j = eight_values(codes_$j, $su % CHUNK);
            //#unroll i ROWS
                let v_$s_$i = broadcast_x_$s(x_$i);
                let sum_$s_$i = sum8(v_$s_$i);
                //#unroll j 4: acc_$i[$j] += scaled_sum(tree8(v_$s_$i, w_$s_$j), sum_$s_$i, scale[$j], minimum[$j]);
            //#end
//#endif
        //#end
    }
    //#unroll i ROWS
        if (m0 + $iu < params.rows && column < padded_columns()) {
            var all_$i = params.scale * acc_$i;
            for (var k = 0u; k < term_units(); k += 1u) {
                all_$i += term4(m0 + $iu, layer_of(column), column, expert, k);
            }
            store4(m0 + $iu, column, all_$i);
        }
    //#end
}
