// y[m, :] = scale · features[places[m] - 1, :]  for the rows with places[m] > 0.
//
// places (rows), features (·, ·), y (rows, ·); other rows of y are left alone.
// Launcher: ops/image_features.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= y.stride
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> places: array<u32>;
//#input 2 features: 4 float32 table
//#output 3 y: 4

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let place = places[m];
    if (place > 0u) {
        store_y(i, params.scale * load_features((place - 1u) * params.stride + i % params.stride));
    }
}
