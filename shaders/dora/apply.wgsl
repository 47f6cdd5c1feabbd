// y[m, c] = magnitude[c] · inverse[c] · z[m, c] + bias[c] + residual[m, c]
//
// z, residual, y (rows, columns), y overwritten; magnitude, inverse, bias (columns) float32.
// Launcher: ops/dora.py.
//#include common/flat.wgsl
//#include common/dora_factor.wgsl

struct Params {
    rows: u32, //= y.rows
    columns: u32, //= y.columns
    stride: u32, //= y.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 z: 8
//#input 4 bias?: 8 float32
//#input 5 residual?: 8
//#output 6 y: 8

fn each(i: u32) {
    if (i < params.rows * params.stride) {
        let unit = i % params.stride;
        let v = add8(multiply8(factor8(unit), load_z(i)), load_bias(unit));
        store_y(i, add8(v, load_residual(i)));
    }
}
