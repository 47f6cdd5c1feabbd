// y[i, :] = x[rows[first + i], :]  for the first batch_info[0] - first rows; zero after them.
//
// x, y: rows of one layout, in words of 16 bytes, images (IMAGE) or buffers; y (count, ·) overwritten. Launcher: ops/rows.py.
//#include common/flat.wgsl

struct Params {
    count: u32,
    first: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
//#if IMAGE
@group(0) @binding(1) var x: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(4) var y: texture_storage_2d<rgba32uint, write>;

fn load(i: u32) -> vec4<u32> {
    return textureLoad(x, vec2<u32>(i & 1023u, i >> 10u));
}

fn store(i: u32, word: vec4<u32>) {
    textureStore(y, vec2<u32>(i & 1023u, i >> 10u), word);
}
//#else
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<u32>>;

fn load(i: u32) -> vec4<u32> {
    return x[i];
}

fn store(i: u32, word: vec4<u32>) {
    y[i] = word;
}
//#endif

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
