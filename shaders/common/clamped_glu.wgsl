// What both directions of gpt-oss's gated unit share.
//#include common/logistic.wgsl

struct Params {
    units: u32, //= gate.units
    alpha: f32,
    limit: f32,
}

@group(0) @binding(0) var<uniform> params: Params;

// min(x, limit) and max(x, -limit), but NaN stays NaN. Told by bits: comparing floats is min and max to
// drivers that compile with fast math. Numbers beyond the limit, infinity the last, follow its bits.
fn is_beyond(bits: vec4<u32>) -> vec4<bool> {
    let limit = bitcast<u32>(params.limit);
    return bits - vec4<u32>(limit + 1u) < vec4<u32>(0x7f800000u - limit);
}

fn lowered(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(params.limit), is_beyond(bitcast<vec4<u32>>(x)));
}

fn lifted(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(-params.limit), is_beyond(bitcast<vec4<u32>>(x) ^ vec4<u32>(0x80000000u)));
}
