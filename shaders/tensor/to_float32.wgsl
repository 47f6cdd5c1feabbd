// y = x, an operand (bfloat16) as float32, of one layout. Launcher: ops/tensor.py.
//#include common/flat.wgsl
//#include common/unit4.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Unit4>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

fn each(i: u32) {
    if (i < params.units) {
        y[i] = unpack4(x[i]);
    }
}
