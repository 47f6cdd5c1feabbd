// cache[past + row, :] = x[row, :],  past = batch_info[3]: the keys or values of new tokens.
//
// x (rows, columns), cache (capacity, columns) of one type, in words of 16 bytes.
// Launcher: ops/cached_attention.py.
//#include common/flat.wgsl

struct Params {
    rows: u32,
    capacity: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: words
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
//#output 3 cache: words

fn each(i: u32) {
    let row = batch_info[3] + i / params.stride;
    if (i / params.stride < params.rows && row < params.capacity) {
        store_cache(row * params.stride + i % params.stride, load_x(i));
    }
}
