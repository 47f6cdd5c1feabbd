// The scale of a block of a quantized matrix: absmax[block], or doubly quantized (nested_absmax is
// bound) nested_map[absmax_code] · nested_absmax[block / nested_blocksize] (+ nested_offset).
// With MINIMA each is followed by the block's minimum, stored likewise: block becomes 2 · block;
// with ZEROS that is added before the scale multiplies.
// maps: the values of quant_map, then the 256 of nested_map and nested_offset, or the last factor.
//#if nested_absmax
@group(0) @binding(2) var<storage, read> absmax: array<u32>;
@group(0) @binding(4) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(6) var<storage, read> maps: array<f32>;

fn stored(expert: u32, at: u32, nested: u32) -> f32 {
    let code = (absmax[expert * params.absmax_expert + at / 4u] >> (8u * (at % 4u))) & 0xffu;
    let map = expert * params.maps_expert + VALUES;
//#if OFFSET
    return maps[map + code] * nested_absmax[expert * params.nested_expert + nested] + maps[map + 256u];
//#else
    return maps[map + code] * nested_absmax[expert * params.nested_expert + nested];
//#endif
}
//#else
@group(0) @binding(2) var<storage, read> absmax: array<f32>;

fn stored(expert: u32, at: u32, nested: u32) -> f32 {
    return absmax[expert * params.absmax_expert + at];
}
//#endif

//#if MINIMA
fn block_scale(expert: u32, block: u32) -> f32 {
    return stored(expert, 2u * block, 2u * (block / NESTED_BLOCKSIZE));
}

fn block_minimum(expert: u32, block: u32) -> f32 {
    return stored(expert, 2u * block + 1u, 2u * (block / NESTED_BLOCKSIZE) + 1u);
}
//#else
fn block_scale(expert: u32, block: u32) -> f32 {
    return stored(expert, block, block / NESTED_BLOCKSIZE);
}

fn block_minimum(expert: u32, block: u32) -> f32 {
    return 0.0;
}
//#endif

// What codes with these values stand for. The minimum is read where there is one.
fn weights(values: vec4<f32>, scale: f32, minimum: f32) -> vec4<f32> {
//#if ZEROS
    return (values + minimum) * scale;
//#else
//#if MINIMA
    return values * scale + minimum;
//#else
//#if TWO_FACTORS
    // Read, not a constant, which drivers would multiply one of the others by.
    return values * scale * quant_map[VALUES + 256u];
//#else
    return values * scale;
//#endif
//#endif
//#endif
}
