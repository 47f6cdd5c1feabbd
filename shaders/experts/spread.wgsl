// y[row, :] = x[choices[row] / top, :], zero for rows that nobody has.
//
// x, y: operands of one layout, in words of 16 bytes, images (IMAGE) or buffers; y is overwritten.
// Launcher: ops/routing.py.
//#include common/flat.wgsl
//#include common/words.wgsl

struct Params {
    rows: u32,
    stride: u32,
    top: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> choices: array<u32>;

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    let choice = choices[row];
    if (choice == 0xffffffffu) {
        store(i, vec4<u32>(0u));
    } else {
        store(i, load(choice / params.top * params.stride + i % params.stride));
    }
}
