// y = 0, in words of 16 bytes. Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= y.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#output 1 y: words

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, vec4<u32>(0u));
    }
}
