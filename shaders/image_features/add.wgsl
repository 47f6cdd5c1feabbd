// y[m, :] = x[m, :] + features[places[m] - 1, :]  for the rows with places[m] > 0, else x[m, :].
//
// places (rows), features (·, ·), x, y (rows, ·), y overwritten. Launcher: ops/image_features.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= y.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> places: array<u32>;
//#input 2 features: 4 float32 table
//#input 3 x: 4
//#output 4 y: 4

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    var v = load_x(i);
    let place = places[m];
    if (place > 0u) {
        v += load_features((place - 1u) * params.stride + i % params.stride);
    }
    store_y(i, v);
}
