// y = clamp(x, -limit, limit), element by element. x, y of one layout; y overwritten, zero padding
// stays zero. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    limit: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8

fn four(x: vec4<f32>) -> vec4<f32> {
    return clamp(x, vec4<f32>(-params.limit), vec4<f32>(params.limit));
}

fn each(i: u32) {
    if (i < params.units) {
        let x = load_x(i);
        store_y(i, Eight(four(x.even), four(x.odd)));
    }
}
