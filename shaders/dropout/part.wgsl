// y = mask ⊙ x, or with rest (1 - mask) ⊙ x: together they are x.
// x, y of one layout, of any types; y overwritten, its padding with zeros. Launcher: ops/dropout.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
    rest: u32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
//#output 3 y: 8
//#include common/dropout.wgsl

fn each(i: u32) {
    if (i < params.units) {
        var factor = dropout_mask8(8u * i);
        if (params.rest == 1u) {
            factor = add_scaled8(eight(vec4<f32>(1.0), vec4<f32>(1.0)), -1.0, factor);
        }
        store_y(i, multiply8(factor, load_x(i)));
    }
}
