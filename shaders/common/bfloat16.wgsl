// float32 to bfloat16, rounded to nearest even; two to a u32, the first in the low half. NaN stays
// NaN: rounding would carry 0x7fffffff, which is NVIDIA's, over into -0.
fn to_bf16(v: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(v);
    let odd = (bits >> vec4<u32>(16u)) & vec4<u32>(1u);
    let rounded = (bits + vec4<u32>(0x7fffu) + odd) >> vec4<u32>(16u);
    let quiet = (bits >> vec4<u32>(16u)) | vec4<u32>(0x40u);
    return select(rounded, quiet, (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u));
}

// The same in the high half of a word. It is no shift of to_bf16's: software adapters write word by
// word, and LLVM would leave such a last step of joining two halves to each of those writes, which
// then take both halves out of vectors.
fn to_high_bf16(v: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(v);
    let odd = (bits >> vec4<u32>(16u)) & vec4<u32>(1u);
    let rounded = (bits + vec4<u32>(0x7fffu) + odd) & vec4<u32>(0xffff0000u);
    let quiet = (bits & vec4<u32>(0xffff0000u)) | vec4<u32>(0x400000u);
    return select(rounded, quiet, (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u));
}

fn pack_bf16(v: vec4<f32>) -> vec2<u32> {
    return to_bf16(v).xz | to_high_bf16(v).yw;
}

fn unpack_bf16(u: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(u.x << 16u, u.x & 0xffff0000u, u.y << 16u, u.y & 0xffff0000u));
}
