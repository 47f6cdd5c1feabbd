// y[rows[i], :] *= factors[i]  for the batch_info[0] label rows, float32, in place; others are left
// alone. Launcher: ops/label_rows.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= y.rows
    stride: u32, //= y.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> rows: array<u32>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read> factors: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;

fn each(i: u32) {
    let row = i / params.stride;
    if (row < params.count && row < batch_info[0]) {
        y[rows[row] * params.stride + i % params.stride] *= factors[row];
    }
}
