// What attention's backward kernels share. lse_delta: per query and head, by attention/delta.wgsl.
//#if SEGMENT_TEXELS
//#input 6 lse_delta: 2 float32 texture

fn pair_of(i: u32) -> vec2<f32> {
    return load_lse_delta(i);
}
//#else
@group(0) @binding(6) var<storage, read> lse_delta: array<vec2<f32>>;

fn pair_of(i: u32) -> vec2<f32> {
    return lse_delta[i];
}
//#endif

// p = exp(s - lse), and ds, the gradient of scale · q·k.
struct Weight {
    p: f32,
    ds: f32,
}

// product = scale · q·k, dp = do·v, pair = (lse, delta).
fn weight_of(product: f32, dp: f32, pair: vec2<f32>, sees: bool) -> Weight {
    let s = score(product);
    let p = select(0.0, exp(not_above_zero(s.value - pair.x)), sees);
    return Weight(p, p * (dp - pair.y) * s.slope);
}
