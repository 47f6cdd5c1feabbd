// σ(x), written so that exp's argument is never positive, and its slope: not σ(1 - σ), which is zero
// where σ is rounded to one.

fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    let e = exp(-abs(x));
    return select(vec4<f32>(1.0), e, x < vec4<f32>(0.0)) / (1.0 + e);
}

fn sigmoid_gradient(x: vec4<f32>) -> vec4<f32> {
    let e = exp(-abs(x));
    return e / ((1.0 + e) * (1.0 + e));
}
