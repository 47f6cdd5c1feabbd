// A matrix of operands, OPERAND at binding OPERAND_BINDING, four neighbouring elements at a time: an
// image (IMAGE) from params.texel0 on, or a buffer.
//#include common/unit4.wgsl
//#if IMAGE
@group(0) @binding(OPERAND_BINDING) var OPERAND: texture_storage_2d<rgba32uint, read>;

fn four(i: u32) -> vec4<f32> {
//#if BF16
    let at = params.texel0 + i / 2u;
    let texel = textureLoad(OPERAND, vec2<u32>(at & 1023u, at >> 10u));
    return unpack4(select(texel.xy, texel.zw, i % 2u == 1u));
//#else
    let at = params.texel0 + i;
    return bitcast<vec4<f32>>(textureLoad(OPERAND, vec2<u32>(at & 1023u, at >> 10u)));
//#endif
}
//#else
@group(0) @binding(OPERAND_BINDING) var<storage, read> OPERAND: array<Unit4>;

fn four(i: u32) -> vec4<f32> {
    return unpack4(OPERAND[i]);
}
//#endif
