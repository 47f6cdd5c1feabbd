// y_m = base_m + (1 + gains[j]) · (made - predicted) (+ added if j > 0), row by row, for COUNT
// streams m, of which the first is stream FIRST; j is the number of m, without SKIPPED (AltUp).
//
// base, y (COUNT · rows, columns), made, predicted, added (rows, columns), gains (rows, streams);
// y is overwritten. Launcher: ops/altup.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= made.units
    stride: u32, //= made.stride
    gains_stride: u32, //= gains.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 base: 8
//#input 2 predicted: 8
//#input 3 made: 8
//#input 4 gains: 1
//#input 5 added?: 8
//#output 6 y: 8

fn each(at: u32) {
    if (at >= COUNT * params.units) {
        return;
    }
    let within = at % params.units;
    var j = FIRST + at / params.units;
    j += select(0u, 1u, j >= SKIPPED);
    let gain = 1.0 + load_gains(within / params.stride * params.gains_stride + j);
    let innovation = add_scaled8(load_made(within), -1.0, load_predicted(within));
    var v = add_scaled8(load_base(at), gain, innovation);
//#if added
    if (j > 0u) {
        v = add8(v, load_added(within));
    }
//#endif
    store_y(at, v);
}
