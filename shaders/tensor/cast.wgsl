// y = bfloat16(x), element by element, of one layout, in units of eight. Launcher: ops/tensor.py.
//#include common/flat.wgsl
//#include common/operand_out.wgsl OPERAND=y OPERAND_BINDING=2

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, x[2u * i], x[2u * i + 1u]);
    }
}
