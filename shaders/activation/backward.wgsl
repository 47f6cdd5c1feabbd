// dx = dy · act'(x), element by element. dy, x, dx of one layout; dx overwritten.
// Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/activation.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 x: 8
//#output 3 dx: 8

fn each(i: u32) {
    if (i < params.units) {
        store_dx(i, multiply8(load_dy(i), activate_gradient8(load_x(i))));
    }
}
