// y = x · factors, column by column.
//
// x, y (rows, columns), factors (columns); y is overwritten. The factors of padding are zero.
// Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
    stride: u32, //= x.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 factors: 8 float32
//#output 3 y: 8

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    store_y(i, multiply8(load_x(i), load_factors(i % params.stride)));
}
