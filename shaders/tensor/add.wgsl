// y = a + b, of one layout and any types, y float32; or with ACCUMULATE y += b.
// Launcher: graph/graph.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= y.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 a?: 8
//#input 2 b: 8
//#output 3 y: 8 sum

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, add8(load_a(i), load_b(i)));
    }
}
