// y += x, y bfloat16, from unit first on: each sum is made in float32 and rounded to nearest even.
//
// In units of four; rows of x follow each other as in y. Launcher: ops/tensor.py.
//#include common/flat.wgsl
//#include common/bfloat16.wgsl

struct Params {
    units: u32, //= x.units
    first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec2<u32>>;

fn each(i: u32) {
    if (i < params.units) {
        let at = params.first + i;
        y[at] = pack_bf16(unpack_bf16(y[at]) + x[i]);
    }
}
