// da = -ddecay · exp(a_log) · sigmoid(a + dt_bias),  db = dbeta · largest · sigmoid'(b), element by element.
//
// All (rows, heads) but a_log and dt_bias (heads), which are frozen; da and db overwritten, their
// padding with zeros. A gradient that is not bound is zero. Launcher: ops/delta_net.py.
//#include common/flat.wgsl
//#include common/logistic.wgsl
//#include common/within.wgsl

struct Params {
    units: u32, //= a.units
    stride: u32, //= a.stride
    heads: u32,
    largest: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 a: 8
//#input 2 b: 8
//#input 3 a_log: 8 float32
//#input 4 dt_bias: 8 float32
//#input 5 ddecay?: 8
//#input 6 dbeta?: 8
//#output 7 da: 8
//#output 8 db: 8

fn da_of(dy: vec4<f32>, a: vec4<f32>, a_log: vec4<f32>, dt_bias: vec4<f32>) -> vec4<f32> {
    return -dy * exp(a_log) * sigmoid(a + dt_bias);
}

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    let unit = i % params.stride;
    let a = load_a(i);
    let b = load_b(i);
    let a_log = load_a_log(unit);
    let dt_bias = load_dt_bias(unit);
    let dy = load_ddecay(i);
    let da = Eight(da_of(dy.even, a.even, a_log.even, dt_bias.even), da_of(dy.odd, a.odd, a_log.odd, dt_bias.odd));
    store_da(i, within(da, unit, params.heads));
    let slopes = Eight(sigmoid_gradient(b.even), sigmoid_gradient(b.odd));
    let db = scale8(multiply8(load_dbeta(i), slopes), params.largest);
    store_db(i, within(db, unit, params.heads));
}
