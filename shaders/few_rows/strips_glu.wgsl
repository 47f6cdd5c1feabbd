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
    let m0 = place.y * (BLOCKS * ROWS);
    let gate_sums = products_of(own, 0u, m0, local.x);
    let up_sums = products_of(units + own, 1u, m0, local.x);
    // A loop: activations of every row, written one after the other, take minutes to compile.
    var gates: array<vec4<f32>, BLOCKS * ROWS>;
    var ups: array<vec4<f32>, BLOCKS * ROWS>;
    //#unroll p BLOCKS, i ROWS: gates[$pu * ROWS + $iu] = gate_sums.row_$p_$i;
    //#unroll p BLOCKS, i ROWS: ups[$pu * ROWS + $iu] = up_sums.row_$p_$i;
    let rows = select(0u, min(params.rows - m0, BLOCKS * ROWS), unit < units);
    for (var i = 0u; i < rows; i += 1u) {
        store_y((m0 + i) * params.y_stride + unit, activate(rounded_y(gates[i])) * rounded_y(ups[i]));
    }
}
