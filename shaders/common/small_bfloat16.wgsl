// Eight values as bfloat16 (common/bfloat16.wgsl), of which none is NaN.
fn small_bf16(v: Eight) -> vec4<u32> {
    return (nearest_bf16(v.even) >> vec4<u32>(16u)) | (nearest_bf16(v.odd) & vec4<u32>(0xffff0000u));
}

// In the high half; what is in the low one is to be dropped.
fn nearest_bf16(v: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(v);
    return bits + vec4<u32>(0x7fffu) + ((bits >> vec4<u32>(16u)) & vec4<u32>(1u));
}
