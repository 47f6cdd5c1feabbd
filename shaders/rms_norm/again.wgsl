// y = x · rstd · weight: what rms_norm/forward.wgsl made, to the bit, where it added no residual.
//
// x, y of one layout, `stride` units of eight to a row, weight (columns), rstd (rows) float32; y
// overwritten. Launcher: ops/norms.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    stride: u32, //= x.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 weight: 8 float32
@group(0) @binding(3) var<storage, read> rstd: array<f32>;
//#output 4 y: 8

fn each(i: u32) {
    if (i < params.units) {
        let row = i / params.stride;
        store_y(i, multiply8(scale8(load_x(i), rstd[row]), load_weight(i - row * params.stride)));
    }
}
