// y = mask ⊙ x, or with REST (1 - mask) ⊙ x: together they are x.
// x, y of one layout, of any types; y overwritten, its padding with zeros. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= x.units
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
//#output 3 y: 8
//#include common/dropout.wgsl
//#include common/dropout_rest.wgsl

fn each(i: u32) {
    if (i < params.units) {
        let mask = dropout_mask8(8u * i);
        //#if REST
        store_y(i, multiply8(rest8(mask), load_x(i)));
        //#else
        store_y(i, multiply8(mask, load_x(i)));
        //#endif
    }
}
