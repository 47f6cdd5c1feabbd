// keys[places[m], positions[m], :] = k[m, :], and values alike: those of new tokens.
//
// k, v (rows, columns), keys, values (texts, capacity, columns) of one type, in words of 16 bytes.
// Launcher: ops/attention.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= k.rows
    capacity: u32,
    stride: u32, //= k.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 k: words
//#input 2 v: words
@group(0) @binding(3) var<storage, read> positions: array<u32>;
@group(0) @binding(4) var<storage, read> places: array<u32>;
//#output 5 keys: words
//#output 6 values: words

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let position = positions[m];
    if (position < params.capacity) {
        let at = (places[m] * params.capacity + position) * params.stride + i % params.stride;
        store_keys(at, load_k(i));
        store_values(at, load_v(i));
    }
}
