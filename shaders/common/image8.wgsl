// Operands kept as images of 16-byte texels: software adapters read those without a branch per
// lane and word, four times as fast as storage buffers. Texel i lies at (i mod 1024, i / 1024).
//
// Eight neighbouring elements of a row are one texel of bfloat16 or two of float32. They are
// taken apart into the even and the odd ones: a shift and a mask, in any order a product accepts.
struct Eight {
    even: vec4<f32>,
    odd: vec4<f32>,
}

fn place(i: u32) -> vec2<u32> {
    return vec2<u32>(i & 1023u, i >> 10u);
}

fn texel(image: texture_storage_2d<rgba32uint, read>, i: u32) -> vec4<u32> {
    return textureLoad(image, place(i));
}

fn eight_bf16(t: vec4<u32>) -> Eight {
    return Eight(bitcast<vec4<f32>>(t << vec4<u32>(16u)), bitcast<vec4<f32>>(t & vec4<u32>(0xffff0000u)));
}

fn eight_f32(lo: vec4<u32>, hi: vec4<u32>) -> Eight {
    return Eight(bitcast<vec4<f32>>(vec4<u32>(lo.xz, hi.xz)), bitcast<vec4<f32>>(vec4<u32>(lo.yw, hi.yw)));
}

fn load_bf16(image: texture_storage_2d<rgba32uint, read>, unit: u32) -> Eight {
    return eight_bf16(texel(image, unit));
}

fn load_f32(image: texture_storage_2d<rgba32uint, read>, unit: u32) -> Eight {
    return eight_f32(texel(image, 2u * unit), texel(image, 2u * unit + 1u));
}

fn dot8(a: Eight, b: Eight) -> f32 {
    return dot(a.even, b.even) + dot(a.odd, b.odd);
}
