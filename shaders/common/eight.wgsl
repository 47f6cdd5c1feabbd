// Eight neighbouring elements as float32, taken apart into the even and the odd ones: for bfloat16
// that is one shift and one mask, and all that a product along the row needs.
struct Eight {
    even: vec4<f32>,
    odd: vec4<f32>,
}

// Eight float32 as they lie in a buffer.
struct Float8 {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

fn eight(lo: vec4<f32>, hi: vec4<f32>) -> Eight {
    return Eight(vec4<f32>(lo.xz, hi.xz), vec4<f32>(lo.yw, hi.yw));
}

fn low(v: Eight) -> vec4<f32> {
    return vec4<f32>(v.even.x, v.odd.x, v.even.y, v.odd.y);
}

fn high(v: Eight) -> vec4<f32> {
    return vec4<f32>(v.even.z, v.odd.z, v.even.w, v.odd.w);
}

fn zero8() -> Eight {
    return Eight(vec4<f32>(0.0), vec4<f32>(0.0));
}

fn dot8(a: Eight, b: Eight) -> f32 {
    return dot(a.even, b.even) + dot(a.odd, b.odd);
}

fn scale8(a: Eight, s: f32) -> Eight {
    return Eight(a.even * s, a.odd * s);
}

fn multiply8(a: Eight, b: Eight) -> Eight {
    return Eight(a.even * b.even, a.odd * b.odd);
}

fn add8(a: Eight, b: Eight) -> Eight {
    return Eight(a.even + b.even, a.odd + b.odd);
}

// sum + s · a
fn add_scaled8(sum: Eight, s: f32, a: Eight) -> Eight {
    return Eight(sum.even + s * a.even, sum.odd + s * a.odd);
}

fn eight_of_bf16(u: vec4<u32>) -> Eight {
    return Eight(bitcast<vec4<f32>>(u << vec4<u32>(16u)), bitcast<vec4<f32>>(u & vec4<u32>(0xffff0000u)));
}

fn bf16_of_eight(v: Eight) -> vec4<u32> {
    return to_bf16(v.even) | to_high_bf16(v.odd);
}
//#include common/bfloat16.wgsl
