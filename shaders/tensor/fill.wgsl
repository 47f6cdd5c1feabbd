// y = 0.  Words of 16 bytes. Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> y: array<vec4<u32>>;

fn each(i: u32) {
    if (i < params.units) {
        y[i] = vec4<u32>(0u);
    }
}
