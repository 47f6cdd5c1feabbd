// dx = mask ⊙ dkept + (1 - mask) ⊙ drest, of the two parts of dropout/part.wgsl.
// dkept, drest, dx of one layout, of any types; dx overwritten. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= dx.units
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dkept: 8
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
//#input 3 drest: 8
//#output 4 dx: 8
//#include common/dropout.wgsl
//#include common/dropout_rest.wgsl

fn each(i: u32) {
    if (i < params.units) {
        let mask = dropout_mask8(8u * i);
        store_dx(i, add8(multiply8(mask, load_dkept(i)), multiply8(rest8(mask), load_drest(i))));
    }
}
