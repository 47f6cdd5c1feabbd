// activate(x) and activate_gradient(x) = d activate / dx:
// SILU: x·σ(x);  SIGMOID: σ(x);  RELU: max(x, 0);  SQUARED_RELU: max(x, 0)²;  ERF: GELU,
// ½x(1 + erf(x/√2));  QUICK_GELU: x·σ(1.702x);  else GELU's tanh form,
// ½x(1 + tanh(√(2/π)(x + 0.044715x³))).

//#include common/logistic.wgsl
//#if SILU

fn activate(x: vec4<f32>) -> vec4<f32> {
    return x * sigmoid(x);
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    let s = sigmoid(x);
    return s * (1.0 + x * (1.0 - s));
}
//#else
//#if SIGMOID

fn activate(x: vec4<f32>) -> vec4<f32> {
    return sigmoid(x);
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    return sigmoid_gradient(x);
}
//#else
//#if RELU

fn activate(x: vec4<f32>) -> vec4<f32> {
    return max(x, vec4<f32>(0.0));
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(0.0), vec4<f32>(1.0), x > vec4<f32>(0.0));
}
//#else
//#if QUICK_GELU

fn activate(x: vec4<f32>) -> vec4<f32> {
    return x * sigmoid(1.702 * x);
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    let s = sigmoid(1.702 * x);
    return s * (1.0 + 1.702 * x * (1.0 - s));
}
//#else
//#if SQUARED_RELU

fn activate(x: vec4<f32>) -> vec4<f32> {
    let y = max(x, vec4<f32>(0.0));
    return y * y;
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    return 2.0 * max(x, vec4<f32>(0.0));
}
//#else
//#if ERF

// ½·erfc(|x|/√2): the series of erf near zero, where it converges fast, else the continued fraction
// of erfc (Abramowitz & Stegun 7.1.6, 7.1.14).
fn tail(x: f32) -> f32 {
    let z = 0.70710678118 * abs(x);
    let square = z * z;
    if (z < 2.0) {
        var term = z;
        var sum = z;
        for (var n = 1u; n < 28u; n += 1u) {
            term *= 2.0 * square / f32(2u * n + 1u);
            sum += term;
        }
        return 0.5 - 0.5641895835 * exp(-square) * sum;
    }
    var fraction = z;
    for (var n = 24u; n > 0u; n -= 1u) {
        fraction = z + 0.5 * f32(n) / fraction;
    }
    return 0.2820947918 * exp(-square) / fraction;
}

// Φ(x), the normal distribution.
fn normal_below(x: vec4<f32>) -> vec4<f32> {
    let t = vec4<f32>(tail(x.x), tail(x.y), tail(x.z), tail(x.w));
    return select(1.0 - t, t, x < vec4<f32>(0.0));
}

fn activate(x: vec4<f32>) -> vec4<f32> {
    return x * normal_below(x);
}

fn activate_gradient(x: vec4<f32>) -> vec4<f32> {
    return normal_below(x) + 0.3989422804 * x * exp(-0.5 * x * x);
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
//#endif
//#endif
//#endif
//#endif
//#endif

fn activate8(v: Eight) -> Eight {
    return Eight(activate(v.even), activate(v.odd));
}

fn activate_gradient8(v: Eight) -> Eight {
    return Eight(activate_gradient(v.even), activate_gradient(v.odd));
}
