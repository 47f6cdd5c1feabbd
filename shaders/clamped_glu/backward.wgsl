// dup = dy · g · s where |up| ≤ limit,  dgate = dy · (u + 1) · s · (1 + alpha · g · (1 - s)) where
// gate ≤ limit, else 0;  g = min(gate, limit),  u = clamp(up, -limit, limit),  s = σ(alpha · g).
//
// dy, gate, up, dgate, dup of one layout; both outputs overwritten. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/clamped_glu.wgsl
//#input 1 dy: 8
//#input 2 gate: 8
//#input 3 up: 8
//#output 4 dgate: 8
//#output 5 dup: 8

// As PyTorch's clamp has it, and NaN stays NaN.
fn kept(gradient: vec4<f32>, is_cut: vec4<bool>) -> vec4<f32> {
    return select(gradient, vec4<f32>(0.0), is_cut);
}

fn of_up(dy: vec4<f32>, gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    let g = lowered(gate);
    return kept(dy * g * sigmoid(params.alpha * g), abs(up) > vec4<f32>(params.limit));
}

fn of_gate(dy: vec4<f32>, gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    let g = lowered(gate);
    let s = sigmoid(params.alpha * g);
    let slope = s * (1.0 + params.alpha * g * (1.0 - s));
    return kept(dy * (lifted(lowered(up)) + 1.0) * slope, gate > vec4<f32>(params.limit));
}

fn each(i: u32) {
    if (i < params.units) {
        let dy = load_dy(i);
        let gate = load_gate(i);
        let up = load_up(i);
        store_dup(i, Eight(of_up(dy.even, gate.even, up.even), of_up(dy.odd, gate.odd, up.odd)));
        store_dgate(i, Eight(of_gate(dy.even, gate.even, up.even), of_gate(dy.odd, gate.odd, up.odd)));
    }
}
