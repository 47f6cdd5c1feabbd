// activate(x) and activate_gradient(x) = d activate / dx:
// SILU: x·σ(x);  else GELU in its tanh form, ½x(1 + tanh(√(2/π)(x + 0.044715x³))).

// σ(x), written so that exp's argument is never positive.
fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    let e = exp(-abs(x));
    return select(vec4<f32>(1.0), e, x < vec4<f32>(0.0)) / (1.0 + e);
}
//#if SILU

fn activate(x: vec4<f32>) -> vec4<f32> {
    return x * sigmoid(x);
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    let s = sigmoid(x);
    return s * (1.0 + x * (1.0 - s));
}
//#else

// ½(1 + tanh(z)) = σ(2z): drivers' exp is more exact than their tanh.
fn gate_of(x: vec4<f32>) -> vec4<f32> {
    return sigmoid(1.5957691216 * (x + 0.044715 * x * x * x));
}

fn activate(x: vec4<f32>) -> vec4<f32> {
    return x * gate_of(x);
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    let s = gate_of(x);
    return s + x * s * (1.0 - s) * 1.5957691216 * (1.0 + 0.134145 * x * x);
}
//#endif
