// Sums over x of ROWS rows by four columns of a matrix in strips (kernels/gemm/packed.py): a subgroup of
// THREADS loads SPAN units of x, one each, and broadcasts them. Scales are multiplied once for each
// texel of codes. Who includes it has common/few_rows.wgsl.
struct Sums {
    //#unroll i ROWS: row_$i: vec4<f32>,
}

// The sums of the rows from m0 on by the unit-th four columns, for an invocation of the subgroup.
fn sums_of(unit: u32, m0: u32, lane: u32) -> Sums {
    // No invocation leaves alone: a broadcast needs all of them. The last strip is whole, too.
    //#unroll i ROWS: let x_at_$i = min(m0 + $iu, params.rows - 1u) * params.x_stride + lane % SPAN;
    //#unroll i ROWS: var acc_$i = vec4<f32>(0.0);
    var w_at = unit / THREADS * params.w_stride + unit % THREADS;
//#if !DENSE
    let scales_at = unit / THREADS * params.scale_stride + unit % THREADS;
//#endif
    for (var k = 0u; k < params.units; k += SPAN) {
        //#unroll i ROWS: let x_$i = load_x(x_at_$i + k);
//#if DENSE
        //#unroll s SPAN
            //#unroll j 4: let w_$s_$j = load_w(w_at + (4u * $su + $ju) * THREADS);
            //#unroll i ROWS
                let v_$s_$i = broadcast_x_$s(x_$i);
                acc_$i += vec4<f32>(fused8(v_$s_$i, w_$s_0), fused8(v_$s_$i, w_$s_1), fused8(v_$s_$i, w_$s_2), fused8(v_$s_$i, w_$s_3));
            //#end
        //#end
        w_at += 4u * SPAN * THREADS;
//#else
        //#unroll j 4: var codes_$j = vec4<u32>(0u);
        var scale = vec4<f32>(0.0);
        var minimum = vec4<f32>(0.0);
        //#unroll i ROWS: var part_$i = vec4<f32>(0.0);
        //#unroll i ROWS: var all_x_$i = 0.0;
        //#unroll s SPAN
            if ($su % SCALED == 0u) {
                let at_$s = scales_at + (8u * (k + $su)) / BLOCKSIZE * THREADS;
                scale = bitcast<vec4<f32>>(load_scales(at_$s));
//#if MINIMA
                minimum = bitcast<vec4<f32>>(load_minima(at_$s));
//#endif
            }
            if ($su % CHUNK == 0u) {
                //#unroll j 4: codes_$j = load_w(w_at + (4u * ($su / CHUNK) + $ju) * THREADS);
                //#unroll i ROWS: part_$i = vec4<f32>(0.0);
                //#unroll i ROWS: all_x_$i = 0.0;
            }
            //#unroll j 4: let w_$s_$j = eight_values(codes_$j, $su % CHUNK);
            //#unroll i ROWS
                let v_$s_$i = broadcast_x_$s(x_$i);
                part_$i += vec4<f32>(fused8(v_$s_$i, w_$s_0), fused8(v_$s_$i, w_$s_1), fused8(v_$s_$i, w_$s_2), fused8(v_$s_$i, w_$s_3));
                all_x_$i += sum8(v_$s_$i);
                if ($su % CHUNK == CHUNK - 1u) {
                    //#unroll j 4: acc_$i[$j] += scaled_sum(part_$i[$j], all_x_$i, scale[$j], minimum[$j]);
                }
            //#end
        //#end
        w_at += 4u * (SPAN / CHUNK) * THREADS;
//#endif
    }
    var sums: Sums;
    //#unroll i ROWS: sums.row_$i = acc_$i;
    return sums;
}

// tree8 with fused additions.
fn fused8(a: Eight, b: Eight) -> f32 {
    let fours = fma(a.odd, b.odd, a.even * b.even);
    return (fours.x + fours.y) + (fours.z + fours.w);
}
