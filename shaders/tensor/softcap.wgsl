// y = cap · tanh(y / cap), float32, in place. Launcher: ops/tensor.py.
//#include common/flat.wgsl
//#include common/tanh.wgsl

struct Params {
    units: u32, //= y.units
    cap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> y: array<vec4<f32>>;

fn each(i: u32) {
    if (i < params.units) {
        let v = y[i] / params.cap;
        y[i] = params.cap * vec4<f32>(tanh_of(v.x), tanh_of(v.y), tanh_of(v.z), tanh_of(v.w));
    }
}
