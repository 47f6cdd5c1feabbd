// dz[m, c] = magnitude[c] · inverse[c] · dy[m, c]
//
// dy, dz (rows, columns), dz overwritten; magnitude, inverse (columns) float32.
// Launcher: ops/dora.py.
//#include common/flat.wgsl
//#include common/dora_factor.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#output 4 dz: 8

fn each(i: u32) {
    if (i < params.rows * params.stride) {
        store_dz(i, multiply8(factor8(i % params.stride), load_dy(i)));
    }
}
