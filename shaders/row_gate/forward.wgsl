// y[row, :] = sigmoid(gate[row]) · x[row, :] (+ residual[row, :]).
//
// x, residual, y (rows, columns), gate (rows, 1) with gate_stride elements to a row; y overwritten,
// zero padding stays zero. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    stride: u32, //= x.stride
    gate_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 gate: 1
//#output 3 y: 8
//#input 4 residual?: 8

fn each(i: u32) {
    if (i < params.units) {
        let share = 1.0 / (1.0 + exp(-load_gate(i / params.stride * params.gate_stride)));
        store_y(i, add_scaled8(load_residual(i), share, load_x(i)));
    }
}
