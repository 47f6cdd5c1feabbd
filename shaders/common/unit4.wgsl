// Four neighbouring elements of a row of matmul operands (BF16: bfloat16, else float32).
//#if BF16
//#include common/bfloat16.wgsl
alias Unit4 = vec2<u32>;

fn unpack4(u: Unit4) -> vec4<f32> {
    return unpack_bf16(u);
}

fn pack4(v: vec4<f32>) -> Unit4 {
    return pack_bf16(v);
}
//#else
alias Unit4 = vec4<f32>;

fn unpack4(u: Unit4) -> vec4<f32> {
    return u;
}

fn pack4(v: vec4<f32>) -> Unit4 {
    return v;
}
//#endif
