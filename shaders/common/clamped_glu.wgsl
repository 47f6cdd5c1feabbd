// What both directions of gpt-oss's gated unit share.
//#include common/logistic.wgsl

struct Params {
    units: u32,
    alpha: f32,
    limit: f32,
}

@group(0) @binding(0) var<uniform> params: Params;

// min(x, limit) and max(x, -limit), but NaN stays NaN.
fn lowered(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(params.limit), x > vec4<f32>(params.limit));
}

fn lifted(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(-params.limit), x < vec4<f32>(-params.limit));
}
