// dx of short_conv/forward.wgsl with gates, whose sum is computed anew:
//
// dgate_out[m] = dy[m] · sum[m],  g[m] = Σ_j weight[taps - 1 - j] · (dy · gate_out)[m + j]
// dgate_in[m] = g[m] · value[m],  dvalue[m] = g[m] · gate_in[m]
//
// dy (rows, hidden), x and dx (rows, 3 · hidden): dx overwritten. weight and bias are frozen.
// Launcher: ops/delta_net.py.
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
//#input 5 dy: 8
//#output 6 dx: 8
//#include common/short_conv.wgsl

fn each(i: u32) {
    let m = i / params.hidden;
    if (m >= params.rows) {
        return;
    }
    let unit = i % params.hidden;
    let position = m % params.seq;
    var sum = bias_of(unit);
    var g = zero8();
    for (var j = 0u; j < params.taps; j += 1u) {
        let weights = tap(unit, j);
        if (j <= position && segments[m - min(j, m)] == segments[m]) {
            sum = add8(sum, multiply8(weights, convolved(m - j, unit)));
        }
        if (position + j < params.seq && segments[min(m + j, params.rows - 1u)] == segments[m]) {
            let dy = load_dy((m + j) * params.hidden + unit);
            g = add8(g, multiply8(weights, multiply8(dy, gate_out(m + j, unit))));
        }
    }
    let base = m * params.stride + unit;
    store_dx(base, multiply8(g, value(m, unit)));
    store_dx(base + params.hidden, multiply8(load_dy(i), sum));
    store_dx(base + 2u * params.hidden, multiply8(g, gate_in(m, unit)));
}
