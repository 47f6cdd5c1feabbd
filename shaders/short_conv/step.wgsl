// y of short_conv/forward.wgsl for one new token, from the products of it and those before it.
//
// x (1, 3 · hidden), bound with gates alone, state (taps, hidden) float32 by position modulo taps, weight
// (hidden, taps), y (1, hidden): overwritten; batch_info[3] tokens came before.
// Launchers: ops/short_conv.py, ops/causal_conv.py.
//#include common/flat.wgsl

struct Params {
    hidden: u32,
    stride: u32,
    taps: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> batch_info: array<u32>;
//#input 2 x?: 8
//#input 3 weight: 1 float32
//#input 4 bias?: 8 float32
//#input 5 state: 8 float32
//#output 6 y: 8
//#include common/short_conv.wgsl

fn each(i: u32) {
    if (i >= params.hidden) {
        return;
    }
    let past = batch_info[3];
    var sum = bias_of(i);
    for (var j = 0u; j < min(params.taps, past + 1u); j += 1u) {
        sum = add8(sum, multiply8(tap(i, j), load_state((past - j) % params.taps * params.hidden + i)));
    }
    store_y(i, finished(0u, i, sum));
}
