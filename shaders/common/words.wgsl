// Rows that are copied as they are, in words of 16 bytes: x and y, images (IMAGE) or buffers.
//#if IMAGE
@group(0) @binding(1) var x: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(4) var y: texture_storage_2d<rgba32uint, write>;

fn load(i: u32) -> vec4<u32> {
    return textureLoad(x, vec2<u32>(i & 1023u, i >> 10u));
}

fn store(i: u32, word: vec4<u32>) {
    textureStore(y, vec2<u32>(i & 1023u, i >> 10u), word);
}
//#else
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<u32>>;

fn load(i: u32) -> vec4<u32> {
    return x[i];
}

fn store(i: u32, word: vec4<u32>) {
    y[i] = word;
}
//#endif
