// y = clamp(x, lowest, highest), by two numbers that are stored with the model.
// x, y of one layout; y overwritten, its padding with zeros. Launcher: ops/tensor.py.
//#include common/flat.wgsl
//#include common/columns.wgsl

struct Params {
    units: u32, //= x.units
    stride: u32, //= x.stride
    columns: u32, //= x.columns
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 lowest: 1 float32
//#input 3 highest: 1 float32
//#output 4 y: 8

fn each(i: u32) {
    if (i < params.units) {
        let low = vec4<f32>(load_lowest(0u));
        let high = vec4<f32>(load_highest(0u));
        let x = load_x(i);
        let y = Eight(clamp(x.even, low, high), clamp(x.odd, low, high));
        store_y(i, live8(i % params.stride, y));
    }
}
