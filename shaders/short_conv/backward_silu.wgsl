// dx of short_conv/forward.wgsl without gates, whose sums are computed anew:
//
// dx[m] = Σ_j weight[taps - 1 - j] · (dy · silu'(sum))[m + j],  over the rows of m's sample.
//
// dy, x, dx (rows, hidden): dx overwritten. weight and bias are frozen. An invocation reads each row
// that it needs once. Launcher: ops/delta_net.py.
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

// Row m + TAPS - 1 - before's share of the window: zero outside m's sample.
fn near(m: u32, before: u32, unit: u32) -> Eight {
    let after = TAPS - 1u;
    let position = m % params.seq + after;
    if (position < before || position - before >= params.seq) {
        return zero8();
    }
    let row = m + after - before;
    if (segments[row] != segments[m]) {
        return zero8();
    }
    return convolved(row, unit);
}

fn each(i: u32) {
    let m = i / params.hidden;
    if (m >= params.rows) {
        return;
    }
    let unit = i % params.hidden;
    var window: array<Eight, 2u * TAPS - 1u>;  // the last row first
    //#unroll j TAPS: window[$ju] = near(m, $ju, unit); window[$ju + TAPS - 1u] = near(m, $ju + TAPS - 1u, unit);
    //#unroll j TAPS: let tap_$j = tap(unit, $ju);
    var g = zero8();
    //#unroll j TAPS
    {
        let row = m + $ju;
        if (m % params.seq + $ju < params.seq && segments[min(row, params.rows - 1u)] == segments[m]) {
            var sum_$j = bias_of(unit);
            //#unroll k TAPS: sum_$j = add8(sum_$j, multiply8(tap_$k, window[TAPS - 1u - $ju + $ku]));
            let dy_$j = load_dy(row * params.stride + unit);
            g = add8(g, multiply8(tap_$j, multiply8(dy_$j, activate_gradient8(sum_$j))));
        }
    }
    //#end
    store_dx(i, g);
}
