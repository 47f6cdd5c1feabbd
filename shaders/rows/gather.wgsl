// y[i, :] = x[rows[first + i], :]  for the first batch_info[0] - first rows; zero after them.
//
// x, y: rows of one layout, in words of 16 bytes, images (IMAGE) or buffers; y (count, ·) overwritten. Launcher: ops/rows.py.
//#include common/flat.wgsl
//#include common/words.wgsl

struct Params {
    count: u32,
    first: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.count) {
        return;
    }
    if (params.first + row < batch_info[0]) {
        store(i, load(rows[params.first + row] * params.stride + i % params.stride));
    } else {
        store(i, vec4<u32>(0u));
    }
}
