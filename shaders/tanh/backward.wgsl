// dx = dy · (1 - tanh(x)²), element by element. dy, x, dx of one layout; dx overwritten.
// Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 x: 8
//#output 3 dx: 8

// 1 - tanh² = 4e / (1 + e)² with e = exp(-2|x|), without cancellation.
fn slope4(x: vec4<f32>) -> vec4<f32> {
    let e = exp(-2.0 * abs(x));
    return 4.0 * e / ((1.0 + e) * (1.0 + e));
}

fn each(i: u32) {
    if (i < params.units) {
        let x = load_x(i);
        store_dx(i, multiply8(load_dy(i), Eight(slope4(x.even), slope4(x.odd))));
    }
}
