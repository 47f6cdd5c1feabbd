// float32 to bfloat16, rounded to nearest even; two to a u32, the first in the low half. NaN stays
// NaN: rounding would carry 0x7fffffff, which is NVIDIA's, over into -0.
fn to_bf16(v: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(v);
    let odd = (bits >> vec4<u32>(16u)) & vec4<u32>(1u);
    let rounded = (bits + vec4<u32>(0x7fffu) + odd) >> vec4<u32>(16u);
    let quiet = (bits >> vec4<u32>(16u)) | vec4<u32>(0x40u);
    return select(rounded, quiet, (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u));
}

fn pack_bf16(v: vec4<f32>) -> vec2<u32> {
    let h = to_bf16(v);
    return vec2<u32>(h.x | (h.y << 16u), h.z | (h.w << 16u));
}

fn unpack_bf16(u: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(u.x << 16u, u.x & 0xffff0000u, u.y << 16u, u.y & 0xffff0000u));
}
