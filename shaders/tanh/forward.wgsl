// y = tanh(x), element by element. x, y of one layout; y overwritten, zero padding stays zero.
// Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/tanh.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8

fn tanh4(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(tanh_of(x.x), tanh_of(x.y), tanh_of(x.z), tanh_of(x.w));
}

fn each(i: u32) {
    if (i < params.units) {
        let x = load_x(i);
        store_y(i, Eight(tanh4(x.even), tanh4(x.odd)));
    }
}
