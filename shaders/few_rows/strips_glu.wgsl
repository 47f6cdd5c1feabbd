// y = activate(gate) · up, where gate and up are the first and the second half of what
// few_rows/strips.wgsl makes, rounded as it would store them: an invocation makes the same four
// columns of both.
//
// begin1: where the second half begins; a multiple of eight. Launcher: ops/fusion.py.
//#include common/few_rows.wgsl
//#include common/strip_sums.wgsl
//#include common/activation.wgsl

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let unit = place.x * THREADS + local.x;
    let units = params.begin1 / 4u;
    let own = min(unit, units - 1u);
    let m0 = place.y * ROWS;
    let gates = sums_of(own, m0, local.x);
    let ups = sums_of(units + own, m0, local.x);
    //#unroll i ROWS
        if (m0 + $iu < params.rows && unit < units) {
            let gate_$i = with_term(m0 + $iu, 0u, unit, gates.row_$i);
            let up_$i = with_term(m0 + $iu, 1u, unit, ups.row_$i);
            store_y((m0 + $iu) * params.y_stride + unit, activate(rounded_y(gate_$i)) * rounded_y(up_$i));
        }
    //#end
}

fn with_term(row: u32, layer: u32, unit: u32, sums: vec4<f32>) -> vec4<f32> {
    var all = params.scale * sums;
    for (var k = 0u; k < term_units(); k += 1u) {
        all += term4(row, layer, layer * params.begin1 + 4u * unit, 0u, k);
    }
    return all;
}
