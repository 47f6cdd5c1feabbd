// y = activate(gate) · up, where gate and up are the first and the second half of what
// few_rows/strips.wgsl makes, rounded as it would store them: an invocation makes the same four
// columns of both.
//
// begin1: where the second half begins; a multiple of eight. With a (ranks, columns of y) it also
// writes parts (workgroups along columns, rows, ranks), which add up to parts_scale · y · aᵀ.
// Launchers: ops/product_glu.py, kernels/down_in_parts.py.
//#include common/few_rows.wgsl
//#include common/strip_sums.wgsl
//#include common/activation.wgsl
//#input 20 a?: 4 float32
//#output 21 parts?: 4 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let unit = place.x * THREADS + local.x;
    let units = params.begin1 / 4u;
    let own = min(unit, units - 1u);
    let m0 = place.y * ROWS;
    let gates = sums_of(own, m0, local.x);
    let ups = sums_of(units + own, m0, local.x);
    //#unroll i ROWS
        let row_$i = min(m0 + $iu, params.rows - 1u);
        let gate_$i = with_term(row_$i, 0u, own, gates.row_$i);
        let up_$i = with_term(row_$i, 1u, own, ups.row_$i);
        let y_$i = rounded_y(activate(rounded_y(gate_$i)) * rounded_y(up_$i));
        if (m0 + $iu < params.rows && unit < units) {
            store_y(row_$i * params.y_stride + unit, y_$i);
        }
    //#end
//#if parts
    for (var rank = 0u; rank < params.ranks; rank += 4u) {
        let ranks = vec4<u32>(rank) + vec4<u32>(0u, 1u, 2u, 3u);
        //#unroll j 4: let a_$j = load_a(min(ranks[$j], params.ranks - 1u) * params.a_stride + own);
        //#unroll i ROWS
            let own_$i = vec4<f32>(dot(y_$i, a_0), dot(y_$i, a_1), dot(y_$i, a_2), dot(y_$i, a_3));
            let all_$i = params.parts_scale * subgroupAdd(select(vec4<f32>(0.0), own_$i, unit < units));
            if (m0 + $iu < params.rows && local.x == 0u) {
                let at_$i = (place.x * params.rows + m0 + $iu) * params.parts_stride + rank / 4u;
                store_parts(at_$i, select(vec4<f32>(0.0), all_$i, ranks < vec4<u32>(params.ranks)));
            }
        //#end
    }
//#endif
}

fn with_term(row: u32, layer: u32, unit: u32, sums: vec4<f32>) -> vec4<f32> {
    var all = params.scale * sums;
    for (var k = 0u; k < term_units(); k += 1u) {
        all += term4(row, layer, layer * params.begin1 + 4u * unit, 0u, k);
    }
    return all;
}
