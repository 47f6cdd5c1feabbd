// dt = min(max(softplus(raw + bias), low), high), element by element.
//
// raw, dt (rows, heads), bias (heads); dt is overwritten, its padding with zeros. Launcher: ops/mamba.py.
//#include common/flat.wgsl
//#include common/softplus.wgsl
//#include common/within.wgsl

struct Params {
    units: u32, //= raw.units
    stride: u32, //= raw.stride
    heads: u32,
    low: f32,
    high: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 raw: 8
//#input 2 bias: 8 float32
//#output 3 dt: 8

fn dt_of(x: vec4<f32>) -> vec4<f32> {
    return min(max(softplus(x), vec4<f32>(params.low)), vec4<f32>(params.high));
}

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    let unit = i % params.stride;
    let x = add8(load_raw(i), load_bias(unit));
    store_dt(i, within(Eight(dt_of(x.even), dt_of(x.odd)), unit, params.heads));
}
