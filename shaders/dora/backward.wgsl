// dz[m, c] = magnitude[c] · inverse[c] · dy[m, c]
//
// dy, dz (rows, columns), dz overwritten; magnitude, inverse (columns) float32.
// Launcher: ops/dora.py.
//#include common/flat.wgsl
//#include common/dora_factor.wgsl

struct Params {
    rows: u32, //= dy.rows
    columns: u32, //= dy.columns
    stride: u32, //= dy.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#output 4 dz: 8

fn each(i: u32) {
    if (i < params.rows * params.stride) {
        store_dz(i, multiply8(factor8(i % params.stride), load_dy(i)));
    }
}
