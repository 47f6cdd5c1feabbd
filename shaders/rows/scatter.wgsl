// y[rows[first + i], :] = x[i, :]  for the first batch_info[0] - first rows.
//
// x (count, ·), y float32; other rows of y are left alone. Launcher: ops/rows.py.
//#include common/flat.wgsl

struct Params {
    count: u32,
    first: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;

fn each(i: u32) {
    let row = i / params.stride;
    if (row < params.count && params.first + row < batch_info[0]) {
        y[rows[params.first + row] * params.stride + i % params.stride] = x[i];
    }
}
