// y = (factor · x - bias) · scale, column by column.
//
// x, y (rows, columns), bias, scale (columns), zero in their padding; y is overwritten.
// Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    stride: u32, //= x.stride
    factor: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 bias: 8 float32
//#input 3 scale: 8 float32
//#output 4 y: 8

fn each(i: u32) {
    if (i < params.units) {
        let column = i % params.stride;
        let centered = add8(scale8(load_x(i), params.factor), scale8(load_bias(column), -1.0));
        store_y(i, multiply8(centered, load_scale(column)));
    }
}
