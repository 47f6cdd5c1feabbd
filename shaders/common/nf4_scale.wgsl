// The scale of a block of an NF4 matrix: absmax[block], or doubly quantized (nested_absmax is bound)
// nested_map[absmax_code] · nested_absmax[block / nested_blocksize] + nested_offset.
// maps: the 16 values of quant_map, then the 256 of nested_map and nested_offset.
//#if nested_absmax
@group(0) @binding(2) var<storage, read> absmax: array<u32>;
@group(0) @binding(4) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(6) var<storage, read> maps: array<f32>;

fn block_scale(expert: u32, block: u32) -> f32 {
    let code = (absmax[expert * params.absmax_expert + block / 4u] >> (8u * (block % 4u))) & 0xffu;
    let map = expert * params.maps_expert;
    return maps[map + 16u + code] * nested_absmax[expert * params.nested_expert + block / NESTED_BLOCKSIZE] + maps[map + 272u];
}
//#else
@group(0) @binding(2) var<storage, read> absmax: array<f32>;

fn block_scale(expert: u32, block: u32) -> f32 {
    return absmax[expert * params.absmax_expert + block];
}
//#endif
