// y = a · x + b · z, or a · x where there is no z.
// x, y, z of one layout; y overwritten, its padding with zeros. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    a: f32,
    b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 z?: 8
//#output 3 y: 8

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    var v = scale8(load_x(i), params.a);
//#if z
    v = add8(v, scale8(load_z(i), params.b));
//#endif
    store_y(i, v);
}
