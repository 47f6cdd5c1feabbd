// common/few_rows.wgsl through workgroup memory: THREADS invocations share the sums of ROWS rows by
// four columns, each with every THREADS-th chunk of them; a workgroup has GROUPS such groups.
//#include common/few_rows.wgsl

var<workgroup> partial: array<vec4<f32>, THREADS * GROUPS>;

@compute @workgroup_size(THREADS, GROUPS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = 4u * (place.x * GROUPS + local.y);
    let m0 = place.y * ROWS;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    // All reach the barriers: those past the end repeat the last column, unstored.
    //#unroll i ROWS: let x_at_$i = min(m0 + $iu, params.rows - 1u) * params.x_stride;
    //#unroll i ROWS: var acc_$i = vec4<f32>(0.0);
//#if DENSE
    //#unroll j 4: let w_at_$j = expert * params.w_expert + min(column + $ju, params.columns - 1u) * params.w_stride;
    for (var k = local.x; k < params.units; k += THREADS) {
        //#unroll j 4: let w_$j = load_w(w_at_$j + k);
        //#unroll i ROWS
            let v_$i = load_x(x_at_$i + k);
            acc_$i += vec4<f32>(tree8(v_$i, w_0), tree8(v_$i, w_1), tree8(v_$i, w_2), tree8(v_$i, w_3));
        //#end
    }
//#else
    begin_values(local.y * THREADS + local.x, THREADS * GROUPS);
    let layer = layer_of(min(column, params.columns - 1u));
    let begin = part_of(layer, 0u, params.begin1, params.begin2);
    let matrix = layer + expert;
    //#unroll j 4
        let row_$j = min(column + $ju, params.columns - 1u) - begin + 4u * params.y_unit0;
        let codes_at_$j = codes_of_row(matrix, row_$j);
    //#end
    for (var k = local.x * CHUNK; k < params.units; k += THREADS * CHUNK) {
        //#unroll j 4: let codes_$j = chunk_at(codes_at_$j, k);
        var scale = vec4<f32>(0.0);
        var minimum = vec4<f32>(0.0);
//#if UNIT_BY_UNIT
        // One unit after the other, so that no compiler loads all ahead: it does not know the bound,
        // since rows are never 0.
        for (var first = 0u; first < select(CHUNK, 0u, params.rows == 0u); first += 1u) {
//#else
        {
            let first = 0u;
//#endif
        //#unroll c TOGETHER
            if ((first + $cu) % SCALED == 0u) {
                //#unroll j 4
                    let block_$j = block_at(row_$j, k + first + $cu);
                    scale[$j] = block_scale(matrix, block_$j);
                    minimum[$j] = block_minimum(matrix, block_$j);
                //#end
            }
            //#unroll j 4: let w_$c_$j = eight_values(codes_$j, first + $cu);
            //#unroll i ROWS
                let v_$c_$i = load_x(x_at_$i + k + first + $cu);
                let sum_$c_$i = sum8(v_$c_$i);
                //#unroll j 4: acc_$i[$j] += scaled_sum(tree8(v_$c_$i, w_$c_$j), sum_$c_$i, scale[$j], minimum[$j]);
            //#end
        //#end
        }
    }
//#endif
    let first = min(column, params.columns - 1u);
    //#unroll i ROWS
        acc_$i *= params.scale;
        for (var k = local.x; k < term_units(); k += THREADS) {
            acc_$i += term4(min(m0 + $iu, params.rows - 1u), layer_of(first), first, expert, k);
        }
        let all_$i = total4(acc_$i, local.x, local.y);
        if (local.x == 0u && m0 + $iu < params.rows && column < padded_columns()) {
            store4(m0 + $iu, column, all_$i);
        }
    //#end
}

// The sum over the invocations of a group, of which there is a power of two.
//#if ONE_THREAD
fn total4(own: vec4<f32>, thread: u32, group_of: u32) -> vec4<f32> {
    return own;
}
//#else
fn total4(own: vec4<f32>, thread: u32, group_of: u32) -> vec4<f32> {
    let at = group_of * THREADS + thread;
    workgroupBarrier();
    partial[at] = own;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            partial[at] += partial[at + half];
        }
    }
    return partial[group_of * THREADS];
}
//#endif
