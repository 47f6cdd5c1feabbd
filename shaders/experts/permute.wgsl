// y[row, :] = x[assignments[row] / top_k, :], zero for rows that nobody has.
//
// x, y: rows of one layout and type, in words of 16 bytes; y is overwritten.
// Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= y.stride
    top_k: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: words
@group(0) @binding(2) var<storage, read> assignments: array<u32>;
//#output 3 y: words

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    let assignment = assignments[row];
    if (assignment == 0xffffffffu) {
        store_y(i, vec4<u32>(0u));
    } else {
        store_y(i, load_x(assignment / params.top_k * params.stride + i % params.stride));
    }
}
