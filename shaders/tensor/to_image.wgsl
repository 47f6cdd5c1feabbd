// image = x, both in words of 16 bytes. Launcher: ops/image.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var image: texture_storage_2d<rgba32uint, write>;

fn each(i: u32) {
    if (i < params.units) {
        textureStore(image, vec2<u32>(i & 1023u, i >> 10u), x[i]);
    }
}
