// kept[copies[3 + n], i, :] = x[i, :]  for the rows i of one sequence, with TOKENS those of its copies[1]
// tokens, and n below copies[2]; other rows are left alone.
//
// x (rows, ·), kept (sequences, rows, ·) of one type, in words of 16 bytes. copies: the source, its
// tokens, the number of copies, and the place of each. Launcher: ops/kv_cache.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: words
@group(0) @binding(2) var<storage, read> copies: array<u32>;
//#output 3 kept: words table

fn each(i: u32) {
    let row = i / params.stride;
//#if TOKENS
    let rows = min(copies[1], params.rows);
//#else
    let rows = params.rows;
//#endif
    if (row < rows) {
        let value = load_x(i);
        for (var n = 0u; n < copies[2]; n += 1u) {
            store_kept(copies[3u + n] * params.rows * params.stride + i, value);
        }
    }
}
