// decay = -exp(a_log) · softplus(a + dt_bias),  beta = largest · sigmoid(b), element by element.
//
// a, b, decay, beta (rows, heads), a_log, dt_bias (heads); both outputs overwritten, their padding with
// zeros. Launcher: ops/delta_net.py.
//#include common/flat.wgsl
//#include common/softplus.wgsl
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
//#output 5 decay: 8
//#output 6 beta: 8

fn decay_of(a: vec4<f32>, a_log: vec4<f32>, dt_bias: vec4<f32>) -> vec4<f32> {
    return -exp(a_log) * softplus(a + dt_bias);
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
    let decay = Eight(decay_of(a.even, a_log.even, dt_bias.even), decay_of(a.odd, a_log.odd, dt_bias.odd));
    store_decay(i, within(decay, unit, params.heads));
    let beta = scale8(Eight(sigmoid(b.even), sigmoid(b.odd)), params.largest);
    store_beta(i, within(beta, unit, params.heads));
}
