// What one 16-byte texel of an operand holds, as float32: eight bfloat16 or four float32.
//#include common/image8.wgsl
//#if BF16
//#include common/bfloat16.wgsl
alias Values = Eight;

fn values(t: vec4<u32>) -> Values {
    return eight_bf16(t);
}

fn no_values() -> Values {
    return Eight(vec4<f32>(0.0), vec4<f32>(0.0));
}

fn dot_values(a: Values, b: Values) -> f32 {
    return dot8(a, b);
}

fn scaled(a: Values, s: f32) -> Values {
    return Eight(a.even * s, a.odd * s);
}

fn add_scaled(sum: Values, s: f32, a: Values) -> Values {
    return Eight(sum.even + s * a.even, sum.odd + s * a.odd);
}

fn to_texel(a: Values) -> vec4<u32> {
    return to_bf16(a.even) | (to_bf16(a.odd) << vec4<u32>(16u));
}
//#else
alias Values = vec4<f32>;

fn values(t: vec4<u32>) -> Values {
    return bitcast<vec4<f32>>(t);
}

fn no_values() -> Values {
    return vec4<f32>(0.0);
}

fn dot_values(a: Values, b: Values) -> f32 {
    return dot(a, b);
}

fn scaled(a: Values, s: f32) -> Values {
    return a * s;
}

fn add_scaled(sum: Values, s: f32, a: Values) -> Values {
    return sum + s * a;
}

fn to_texel(a: Values) -> vec4<u32> {
    return bitcast<vec4<u32>>(a);
}
//#endif
