// σ(x), written so that exp's argument is never positive.
fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    let e = exp(-abs(x));
    return select(vec4<f32>(1.0), e, x < vec4<f32>(0.0)) / (1.0 + e);
}
