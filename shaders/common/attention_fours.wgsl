// Heads in fours, as attention's tiles read and write them. Where HEAD_UNIT4 is not, heads lie in
// HEAD_UNITS pairs, and the last four is half outside of its head: zeros are read there.
//#include common/attention_heads.wgsl

//#if HEAD_UNIT4
fn four_q(at: u32, unit: u32) -> vec4<f32> {
    return load_q(at + unit);
}
fn four_k(at: u32, unit: u32) -> vec4<f32> {
    return load_k(at + unit);
}
fn four_v(at: u32, unit: u32) -> vec4<f32> {
    return load_v(at + unit);
}
//#if dout
fn four_dout(at: u32, unit: u32) -> vec4<f32> {
    return load_dout(at + unit);
}
//#endif
//#else
fn second(unit: u32) -> u32 {
    return min(2u * unit + 1u, HEAD_UNITS - 1u);
}
fn joined(unit: u32, low: vec2<f32>, high: vec2<f32>) -> vec4<f32> {
    return vec4<f32>(low, select(vec2<f32>(0.0), high, 2u * unit + 1u < HEAD_UNITS));
}
fn four_q(at: u32, unit: u32) -> vec4<f32> {
    return joined(unit, load_q(at + 2u * unit), load_q(at + second(unit)));
}
fn four_k(at: u32, unit: u32) -> vec4<f32> {
    return joined(unit, load_k(at + 2u * unit), load_k(at + second(unit)));
}
fn four_v(at: u32, unit: u32) -> vec4<f32> {
    return joined(unit, load_v(at + 2u * unit), load_v(at + second(unit)));
}
//#if dout
fn four_dout(at: u32, unit: u32) -> vec4<f32> {
    return joined(unit, load_dout(at + 2u * unit), load_dout(at + second(unit)));
}
//#endif
//#endif
