// y[i, :] = x[rows[first + i], :]  for the first batch_info[0] - first rows; zero after them.
//
// x, y: rows of one layout and type, in words of 16 bytes; y (count, ·) overwritten.
// Launcher: ops/label_rows.py.
//#include common/flat.wgsl

struct Params {
    count: u32,
    first: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: words table
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
//#output 4 y: words

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.count) {
        return;
    }
    if (params.first + row < batch_info[0]) {
        store_y(i, load_x(rows[params.first + row] * params.stride + i % params.stride));
    } else {
        store_y(i, vec4<u32>(0u));
    }
}
