// y = x, between a buffer and a texture, in words of 16 bytes. Launcher: graph/passes.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= y.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: words
//#output 2 y: words

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, load_x(i));
    }
}
