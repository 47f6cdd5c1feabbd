// Products of BLOCKS · ROWS rows of x and four columns of a matrix in strips (kernels/gemm/packed.py),
// with the LoRA term, without bias and residual. A subgroup of THREADS loads x of ROWS rows at a time,
// one each, and broadcasts them; of a single row it loads SPAN units instead. Scales are multiplied once
// for each texel of codes. A row's sums have one order in all tilings. The including file includes
// common/few_rows.wgsl.
struct Sums {
    //#unroll p BLOCKS, i ROWS: row_$p_$i: vec4<f32>,
}

// The products of the rows from m0 on and the unit-th four columns, all of one layer, for an invocation
// of the subgroup.
fn products_of(unit: u32, layer: u32, m0: u32, lane: u32) -> Sums {
    var sums = sums_of(unit, m0, lane);
    //#unroll p BLOCKS, i ROWS: sums.row_$p_$i *= params.scale;
//#if u
    // A subgroup with columns of several layers loads u of all of them.
    let first = select(layer, 0u, LAYERS > 1u);
    //#unroll p BLOCKS: let u_at_$p = min(m0 + $pu * ROWS + lane % ROWS, params.rows - 1u) * (params.r_stride / 4u);
    let stride = params.b_stride / 4u;
    //#unroll j 4: let b_at_$j = 4u * params.y_unit0 * stride + min(4u * unit + $ju, params.columns - 1u) * stride;
    for (var k = 0u; k < term_units(); k += 1u) {
        //#unroll j 4: let b_$j = load_b(b_at_$j + k);
        //#unroll p BLOCKS, l LAYERS: let u_$p_$l = load_u(u_at_$p + (first + $lu) * (params.r / 4u) + k);
        //#unroll p BLOCKS, i ROWS
            var own_$p_$i = broadcast_u_$i(u_$p_0);
            //#unroll l LAYERS: own_$p_$i = select(own_$p_$i, broadcast_u_$i(u_$p_$l), first + $lu == layer);
            sums.row_$p_$i += vec4<f32>(dot(own_$p_$i, b_0), dot(own_$p_$i, b_1), dot(own_$p_$i, b_2), dot(own_$p_$i, b_3));
        //#end
    }
//#endif
    return sums;
}

fn sums_of(unit: u32, m0: u32, lane: u32) -> Sums {
    // No invocation leaves alone: a broadcast needs all of them. The last strip is whole, too.
    var w_at = unit / THREADS * params.w_stride + unit % THREADS;
//#if !DENSE
    let scales_at = unit / THREADS * params.scale_stride + unit % THREADS;
//#endif
    var sums: Sums;
//#if ONE_ROW
    let x_at = min(m0, params.rows - 1u) * params.x_stride + lane % SPAN;
    var acc = vec4<f32>(0.0);
    for (var k = 0u; k < params.units; k += SPAN) {
        let x = load_x(x_at + k);
//#if DENSE
        //#unroll s SPAN
            //#unroll j 4: let w_$s_$j = load_w(w_at + (4u * $su + $ju) * THREADS);
            acc += four_sums(broadcast_x_$s(x), w_$s_0, w_$s_1, w_$s_2, w_$s_3);
        //#end
        w_at += 4u * SPAN * THREADS;
//#else
        //#unroll j 4: var codes_$j = vec4<u32>(0u);
        var scale = vec4<f32>(0.0);
        var minimum = vec4<f32>(0.0);
        var part = vec4<f32>(0.0);
        var all_x = 0.0;
        //#unroll s SPAN
            if ($su % SCALED == 0u) {
                scale = scales_of(scales_at, k + $su);
                minimum = minima_of(scales_at, k + $su);
            }
            if ($su % CHUNK == 0u) {
                //#unroll j 4: codes_$j = load_w(w_at + (4u * ($su / CHUNK) + $ju) * THREADS);
                part = vec4<f32>(0.0);
                all_x = 0.0;
            }
            //#unroll j 4: let w_$s_$j = eight_values(codes_$j, $su % CHUNK);
            let v_$s = broadcast_x_$s(x);
            part += four_sums(v_$s, w_$s_0, w_$s_1, w_$s_2, w_$s_3);
            all_x += sum8(v_$s);
            if ($su % CHUNK == CHUNK - 1u) {
                //#unroll j 4: acc[$j] += scaled_sum(part[$j], all_x, scale[$j], minimum[$j]);
            }
        //#end
        w_at += 4u * (SPAN / CHUNK) * THREADS;
//#endif
    }
    sums.row_0_0 = acc;
//#else
    //#unroll p BLOCKS: let x_at_$p = min(m0 + $pu * ROWS + lane % ROWS, params.rows - 1u) * params.x_stride;
    //#unroll p BLOCKS, i ROWS: var acc_$p_$i = vec4<f32>(0.0);
//#if DENSE
    for (var k = 0u; k < params.units; k += 1u) {
        //#unroll j 4: let w_$j = load_w(w_at + $ju * THREADS);
        //#unroll p BLOCKS: let x_$p = load_x(x_at_$p + k);
        //#unroll p BLOCKS, i ROWS: acc_$p_$i += four_sums(broadcast_x_$i(x_$p), w_0, w_1, w_2, w_3);
        w_at += 4u * THREADS;
    }
//#else
    for (var k = 0u; k < params.units; k += CHUNK) {
        let scale = scales_of(scales_at, k);
        let minimum = minima_of(scales_at, k);
        //#unroll j 4: let codes_$j = load_w(w_at + $ju * THREADS);
        //#unroll p BLOCKS, i ROWS: var part_$p_$i = vec4<f32>(0.0);
        //#unroll p BLOCKS, i ROWS: var all_x_$p_$i = 0.0;
        //#unroll c CHUNK
            //#unroll j 4: let w_$c_$j = eight_values(codes_$j, $cu);
            //#unroll p BLOCKS: let x_$c_$p = load_x(x_at_$p + k + $cu);
            //#unroll p BLOCKS, i ROWS
                let v_$c_$p_$i = broadcast_x_$i(x_$c_$p);
                part_$p_$i += four_sums(v_$c_$p_$i, w_$c_0, w_$c_1, w_$c_2, w_$c_3);
                all_x_$p_$i += sum8(v_$c_$p_$i);
            //#end
        //#end
        //#unroll p BLOCKS, i ROWS, j 4: acc_$p_$i[$j] += scaled_sum(part_$p_$i[$j], all_x_$p_$i, scale[$j], minimum[$j]);
        w_at += 4u * THREADS;
    }
//#endif
    //#unroll p BLOCKS, i ROWS: sums.row_$p_$i = acc_$p_$i;
//#endif
    return sums;
}

//#if !DENSE
// Scales, and minima, of the blocks of four columns that have the unit.
fn scales_of(at: u32, unit: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(load_scales(at + (8u * unit) / BLOCKSIZE * THREADS));
}

fn minima_of(at: u32, unit: u32) -> vec4<f32> {
//#if MINIMA
    return bitcast<vec4<f32>>(load_minima(at + (8u * unit) / BLOCKSIZE * THREADS));
//#else
    return vec4<f32>(0.0);
//#endif
}
//#endif

fn four_sums(x: Eight, w_0: Eight, w_1: Eight, w_2: Eight, w_3: Eight) -> vec4<f32> {
    return vec4<f32>(fused8(x, w_0), fused8(x, w_1), fused8(x, w_2), fused8(x, w_3));
}

// tree8 with fused additions.
fn fused8(a: Eight, b: Eight) -> f32 {
    let fours = fma(a.odd, b.odd, a.even * b.even);
    return (fours.x + fours.y) + (fours.z + fours.w);
}
