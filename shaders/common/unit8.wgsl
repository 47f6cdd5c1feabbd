// Eight neighbouring elements of a row of matmul operands (BF16: bfloat16, else float32), read as
// the even and the odd ones: one shift and one mask, and all that a product along the row needs.
//#if BF16
//#include common/bfloat16.wgsl
alias Unit8 = vec4<u32>;

fn even8(u: Unit8) -> vec4<f32> {
    return bitcast<vec4<f32>>(u << vec4<u32>(16u));
}

fn odd8(u: Unit8) -> vec4<f32> {
    return bitcast<vec4<f32>>(u & vec4<u32>(0xffff0000u));
}

fn lo8(u: Unit8) -> vec4<f32> {
    return unpack_bf16(u.xy);
}

fn hi8(u: Unit8) -> vec4<f32> {
    return unpack_bf16(u.zw);
}

fn pack8(lo: vec4<f32>, hi: vec4<f32>) -> Unit8 {
    return vec4<u32>(pack_bf16(lo), pack_bf16(hi));
}
//#else
struct Unit8 {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

fn even8(u: Unit8) -> vec4<f32> {
    return vec4<f32>(u.lo.xz, u.hi.xz);
}

fn odd8(u: Unit8) -> vec4<f32> {
    return vec4<f32>(u.lo.yw, u.hi.yw);
}

fn lo8(u: Unit8) -> vec4<f32> {
    return u.lo;
}

fn hi8(u: Unit8) -> vec4<f32> {
    return u.hi;
}

fn pack8(lo: vec4<f32>, hi: vec4<f32>) -> Unit8 {
    return Unit8(lo, hi);
}
//#endif
