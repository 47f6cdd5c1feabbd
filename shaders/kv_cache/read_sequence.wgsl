// y[i, :] = kept[copies[0], i, :]  for the rows i of one sequence, with TOKENS those of its copies[1]
// tokens.
//
// kept (sequences, rows, ·), y (rows, ·) of one type, in words of 16 bytes; copies as for
// kv_cache/write_sequence.wgsl. Launcher: ops/kv_cache.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 kept: words table
@group(0) @binding(2) var<storage, read> copies: array<u32>;
//#output 3 y: words

fn each(i: u32) {
    let row = i / params.stride;
//#if TOKENS
    let rows = min(copies[1], params.rows);
//#else
    let rows = params.rows;
//#endif
    if (row < rows) {
        store_y(i, load_kept(copies[0] * params.rows * params.stride + i));
    }
}
