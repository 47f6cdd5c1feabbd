// y of short_conv/forward.wgsl for a new token of each text, from the products of it and those before.
//
// x (rows, 3 · hidden), bound with gates alone, state (texts, taps, hidden) float32 by position modulo
// taps, weight (hidden, taps), y (rows, hidden): overwritten; positions[m] tokens came before.
// Launchers: ops/delta_net.py, ops/delta_net.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    hidden: u32,
    stride: u32,
    taps: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(7) var<storage, read> places: array<u32>;
//#input 2 x?: 8 buffer
//#input 3 weight: 1 float32
//#input 4 bias?: 8 float32
//#input 5 state: 8 float32
//#output 6 y: 8
//#include common/short_conv.wgsl

fn each(i: u32) {
    let m = i / params.hidden;
    let unit = i % params.hidden;
    if (m >= params.rows) {
        return;
    }
    let past = positions[m];
    let first = places[m] * params.taps;
    var sum = bias_of(unit);
    for (var j = 0u; j < min(params.taps, past + 1u); j += 1u) {
        sum = add8(sum, multiply8(tap(unit, j), load_state((first + (past - j) % params.taps) * params.hidden + unit)));
    }
    store_y(i, finished(m, unit, sum));
}
