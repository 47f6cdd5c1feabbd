// bench/copy.wgsl between images, which software adapters read and write faster.
//#include common/flat.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var x: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var y: texture_storage_2d<rgba32uint, write>;

fn each(i: u32) {
    if (i < params.units) {
        let at = vec2<u32>(i & 1023u, i >> 10u);
        textureStore(y, at, textureLoad(x, at));
    }
}
