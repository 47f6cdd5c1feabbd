// An output OPERAND at binding OPERAND_BINDING, matmul operands in units of eight: an image of texels
// (IMAGE) or a buffer.
//#include common/unit8.wgsl
//#if IMAGE
@group(0) @binding(OPERAND_BINDING) var OPERAND: texture_storage_2d<rgba32uint, write>;

fn store_OPERAND(unit: u32, lo: vec4<f32>, hi: vec4<f32>) {
//#if BF16
    textureStore(OPERAND, vec2<u32>(unit & 1023u, unit >> 10u), pack8(lo, hi));
//#else
    textureStore(OPERAND, vec2<u32>((2u * unit) & 1023u, unit >> 9u), bitcast<vec4<u32>>(lo));
    textureStore(OPERAND, vec2<u32>((2u * unit + 1u) & 1023u, unit >> 9u), bitcast<vec4<u32>>(hi));
//#endif
}
//#else
@group(0) @binding(OPERAND_BINDING) var<storage, read_write> OPERAND: array<Unit8>;

fn store_OPERAND(unit: u32, lo: vec4<f32>, hi: vec4<f32>) {
    OPERAND[unit] = pack8(lo, hi);
}
//#endif
