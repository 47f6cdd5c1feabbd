// dup = dy · act(kept),  dgate = e - Σe · (1 + deviations · (gate - mean) / std) / columns, with
// e = dy · up · act'(kept) where kept = max(gate - cut, 0) is above zero, else 0: the gradients of
// sparse_glu/forward.wgsl, whose cut depends on the whole row.
//
// dy, gate, up, dgate, dup (rows, columns); both outputs overwritten, their padding with zeros.
// THREADS invocations share a row. Launcher: ops/pointwise.py.
//#include common/row_reduce.wgsl
//#include common/activation.wgsl
//#include common/columns.wgsl
//#include common/sparse_rows.wgsl

struct Params {
    rows: u32, //= gate.rows
    columns: u32, //= gate.columns
    stride: u32, //= gate.stride
    deviations: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 gate: 8
//#input 3 up: 8
//#output 4 dgate: 8
//#output 5 dup: 8

// e, for what is kept of eight elements of the gate.
fn of_kept(at: u32, kept: Eight) -> Eight {
    let e = multiply8(multiply8(load_dy(at), load_up(at)), activate_gradient8(kept));
    return Eight(
        select(vec4<f32>(0.0), e.even, kept.even > vec4<f32>(0.0)),
        select(vec4<f32>(0.0), e.odd, kept.odd > vec4<f32>(0.0)),
    );
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let base = row * params.stride;
    let spread = spread_of(base, local.x);
    var sum = 0.0;
    for (var u = local.x; u < params.stride; u += THREADS) {
        let e = of_kept(base + u, cut_off(load_gate(base + u), spread));
        sum += dot(e.even + e.odd, vec4<f32>(1.0));
    }
    let share = reduce_sum(sum, local.x) / f32(params.columns);
    var slope = 0.0;
    if (spread.deviation > 0.0) {
        slope = share * params.deviations / spread.deviation;
    }
    for (var u = local.x; u < params.stride; u += THREADS) {
        let gate = load_gate(base + u);
        let kept = cut_off(gate, spread);
        let all = add_scaled8(less(of_kept(base + u, kept), share), -slope, less(gate, spread.mean));
        store_dgate(base + u, live8(u, all));
        store_dup(base + u, multiply8(load_dy(base + u), activate8(kept)));
    }
}
