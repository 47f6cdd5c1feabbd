// y = act(x), element by element. x, y of one layout; y overwritten, zero padding stays zero.
// Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/activation.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, activate8(load_x(i)));
    }
}
