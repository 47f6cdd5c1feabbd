// state[place, position % taps] = gate_in[m] · value[m], or (!GATED) x[m], of a text's last taps tokens, for
// the ones to come.
//
// x (rows, 3 · hidden) or (rows, hidden), state (texts, taps, hidden) float32; rows of segment 0 are
// padding, and with APART each row is of another text. Launchers: ops/delta_net.py, ops/delta_net.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    hidden: u32,
    stride: u32, //= x.stride
    taps: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> segments: array<u32>;
@group(0) @binding(2) var<storage, read> positions: array<u32>;
@group(0) @binding(5) var<storage, read> places: array<u32>;
//#input 3 x: 8
//#output 4 state: 8
//#include common/convolved.wgsl

fn each(i: u32) {
    let m = i / params.hidden;
    if (m >= params.rows || segments[m] == 0u) {
        return;
    }
//#if !APART
    let later = m + params.taps;
    if (later < params.rows && segments[min(later, params.rows - 1u)] != 0u) {
        return;
    }
//#endif
    let unit = i % params.hidden;
    let row = places[m] * params.taps + positions[m] % params.taps;
    store_state(row * params.hidden + unit, convolved(m, unit));
}
