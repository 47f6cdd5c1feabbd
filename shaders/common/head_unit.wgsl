// A piece of an attention head: four elements where head_dim allows (HEAD_UNIT4), else two.
//#if HEAD_UNIT4
//#include common/unit4.wgsl
alias HeadUnit = Unit4;
alias HeadValue = vec4<f32>;

fn unpack_head(u: HeadUnit) -> HeadValue {
    return unpack4(u);
}

fn pack_head(v: HeadValue) -> HeadUnit {
    return pack4(v);
}
//#else
alias HeadValue = vec2<f32>;
//#if BF16
//#include common/bfloat16.wgsl
alias HeadUnit = u32;

fn unpack_head(u: HeadUnit) -> HeadValue {
    return bitcast<vec2<f32>>(vec2<u32>(u << 16u, u & 0xffff0000u));
}

fn pack_head(v: HeadValue) -> HeadUnit {
    return pack_bf16(vec4<f32>(v, 0.0, 0.0)).x;
}
//#else
alias HeadUnit = vec2<f32>;

fn unpack_head(u: HeadUnit) -> HeadValue {
    return u;
}

fn pack_head(v: HeadValue) -> HeadUnit {
    return v;
}
//#endif
//#endif
