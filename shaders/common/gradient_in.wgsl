// A gradient dy as it arrives, four neighbouring elements at a time: float32 or (DY_BF16) bfloat16.
//#include common/bfloat16.wgsl
//#if DY_BF16
@group(0) @binding(1) var<storage, read> dy: array<vec2<u32>>;

fn gradient(i: u32) -> vec4<f32> {
    return unpack_bf16(dy[i]);
}
//#else
@group(0) @binding(1) var<storage, read> dy: array<vec4<f32>>;

fn gradient(i: u32) -> vec4<f32> {
    return dy[i];
}
//#endif
