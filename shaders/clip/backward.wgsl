// dx = dy where |x| ≤ limit, else 0, element by element. dy, x, dx of one layout; dx overwritten.
// Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    limit: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 x: 8
//#output 3 dx: 8

fn four(dy: vec4<f32>, x: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(0.0), dy, abs(x) <= vec4<f32>(params.limit));
}

fn each(i: u32) {
    if (i < params.units) {
        let dy = load_dy(i);
        let x = load_x(i);
        store_dx(i, Eight(four(dy.even, x.even), four(dy.odd, x.odd)));
    }
}
