// y[m, :] = 0 for the rows with places[m] > 0, else x[m, :].
//
// places (rows), x, y (rows, ·), y overwritten. Launcher: ops/image_features.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= y.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> places: array<u32>;
//#input 2 x: 4
//#output 3 y: 4

fn each(i: u32) {
    let m = i / params.stride;
    if (m < params.rows) {
        store_y(i, select(vec4<f32>(0.0), load_x(i), places[m] == 0u));
    }
}
