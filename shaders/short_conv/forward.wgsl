// y[m] = gate_out[m] · (bias + Σ_j weight[taps - 1 - j] · (gate_in · value)[m - j]),  channel by channel,
// over the tokens of m's sample that lie j = 0, 1, … before it; or without gates (!GATED)
// y[m] = silu(bias + Σ_j weight[taps - 1 - j] · x[m - j]).
//
// x (rows, 3 · hidden) = [gate_in | gate_out | value] or (rows, hidden), weight (hidden, taps),
// y (rows, hidden): overwritten. An invocation takes eight channels of a row.
// Launchers: ops/delta_net.py, ops/delta_net.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    seq: u32,
    hidden: u32,
    stride: u32, //= x.stride
    taps: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> segments: array<u32>;
//#input 2 x: 8
//#input 3 weight: 1 float32
//#input 4 bias?: 8 float32
//#output 5 y: 8
//#include common/short_conv.wgsl

fn each(i: u32) {
    let m = i / params.hidden;
    if (m >= params.rows) {
        return;
    }
    let unit = i % params.hidden;
    var sum = bias_of(unit);
    for (var j = 0u; j < min(params.taps, m % params.seq + 1u); j += 1u) {
        if (segments[m - j] == segments[m]) {
            sum = add8(sum, multiply8(tap(unit, j), convolved(m - j, unit)));
        }
    }
    store_y(i, finished(m, unit, sum));
}
