// draw = ddt · sigmoid(raw + bias) where softplus(raw + bias) is within the limits, element by element.
//
// All (rows, heads) but bias (heads), which is frozen; draw is overwritten, its padding with zeros.
// Launcher: ops/mamba.py.
//#include common/flat.wgsl
//#include common/logistic.wgsl
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
//#input 3 ddt: 8
//#output 4 draw: 8

fn slope(x: vec4<f32>) -> vec4<f32> {
    let y = softplus(x);
    let inside = (y >= vec4<f32>(params.low)) & (y <= vec4<f32>(params.high));
    return select(vec4<f32>(0.0), sigmoid(x), inside);
}

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    let unit = i % params.stride;
    let x = add8(load_raw(i), load_bias(unit));
    let slopes = Eight(slope(x.even), slope(x.odd));
    store_draw(i, within(multiply8(load_ddt(i), slopes), unit, params.heads));
}
