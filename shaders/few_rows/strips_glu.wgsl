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
    let gates = products_of(own, 0u, m0, local.x);
    let ups = products_of(units + own, 1u, m0, local.x);
    //#unroll p BLOCKS, i ROWS
        let m_$p_$i = m0 + $pu * ROWS + $iu;
        if (m_$p_$i < params.rows && unit < units) {
            store_y(m_$p_$i * params.y_stride + unit, activate(rounded_y(gates.row_$p_$i)) * rounded_y(ups.row_$p_$i));
        }
    //#end
}
