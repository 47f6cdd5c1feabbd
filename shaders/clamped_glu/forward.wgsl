// y = (clamp(up, -limit, limit) + 1) · g · σ(alpha · g),  g = min(gate, limit), element by element.
// gate, up, y of one layout; y overwritten, zero padding stays zero. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/clamped_glu.wgsl
//#input 1 gate: 8
//#input 2 up: 8
//#output 3 y: 8

fn four(gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    let g = lowered(gate);
    return (lifted(lowered(up)) + 1.0) * g * sigmoid(params.alpha * g);
}

fn each(i: u32) {
    if (i < params.units) {
        let gate = load_gate(i);
        let up = load_up(i);
        store_y(i, Eight(four(gate.even, up.even), four(gate.odd, up.odd)));
    }
}
