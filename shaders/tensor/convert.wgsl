// y = x in y's element type, element by element, of one layout. Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, load_x(i));
    }
}
