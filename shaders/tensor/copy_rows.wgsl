// `units` units of y, from unit first_y on, are those of x from unit first_x on: some of their rows.
// x, y of one layout, of any types; only these rows of y are written. Launcher: ops/altup.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
    first_x: u32,
    first_y: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8

fn each(i: u32) {
    if (i < params.units) {
        store_y(params.first_y + i, load_x(params.first_x + i));
    }
}
