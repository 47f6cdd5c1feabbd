// Eight neighbouring elements of a weight: stored like the other operand, or as float32 (W_FLOAT).
//#include common/unit8.wgsl
//#if W_FLOAT
struct Weight8 {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

fn weight_even8(u: Weight8) -> vec4<f32> {
    return vec4<f32>(u.lo.xz, u.hi.xz);
}

fn weight_odd8(u: Weight8) -> vec4<f32> {
    return vec4<f32>(u.lo.yw, u.hi.yw);
}
//#else
alias Weight8 = Unit8;

fn weight_even8(u: Weight8) -> vec4<f32> {
    return even8(u);
}

fn weight_odd8(u: Weight8) -> vec4<f32> {
    return odd8(u);
}
//#endif
