// y = s · x, with a number s that is stored with the model.
// x, y of one layout; y overwritten, its padding with zeros. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 scalar: 1 float32
//#output 3 y: 8

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, scale8(load_x(i), load_scalar(0u)));
    }
}
