// xIELU (Huang & Schlag, 2024) with stored scalars: for x > 0  p·x² + β·x,
// else  n·(exp(m) - 1 - x) + β·x  with m = min(x, ε);  p = softplus(alpha_p), n = β + softplus(alpha_n).

// log(1 + exp(x)), written so that exp's argument is never positive.
fn softplus(x: f32) -> f32 {
    return max(x, 0.0) + log(1.0 + exp(-abs(x)));
}

// exp(x) - 1 - x: by its series near zero, where the difference would cancel.
fn curved(x: vec4<f32>) -> vec4<f32> {
    var sum = vec4<f32>(1.0 / 3628800.0);
    sum = sum * x + 1.0 / 362880.0;
    sum = sum * x + 1.0 / 40320.0;
    sum = sum * x + 1.0 / 5040.0;
    sum = sum * x + 1.0 / 720.0;
    sum = sum * x + 1.0 / 120.0;
    sum = sum * x + 1.0 / 24.0;
    sum = sum * x + 1.0 / 6.0;
    sum = sum * x + 0.5;
    return select(exp(x) - 1.0 - x, x * x * sum, abs(x) < vec4<f32>(0.7));
}

struct Curve {
    p: f32,
    n: f32,
    beta: f32,
    eps: f32,
}

fn curve() -> Curve {
    let beta = load_beta(0u);
    return Curve(softplus(load_alpha_p(0u)), beta + softplus(load_alpha_n(0u)), beta, load_eps(0u));
}

fn xielu(x: vec4<f32>, c: Curve) -> vec4<f32> {
    let m = min(x, vec4<f32>(c.eps));
    let below = c.n * (curved(m) + (m - x));
    return select(below, c.p * x * x, x > vec4<f32>(0.0)) + c.beta * x;
}

fn xielu_gradient(x: vec4<f32>, c: Curve) -> vec4<f32> {
    let m = min(x, vec4<f32>(c.eps));
    let below = c.n * select(vec4<f32>(-1.0), curved(m) + m, x < vec4<f32>(c.eps));
    return select(below, 2.0 * c.p * x, x > vec4<f32>(0.0)) + c.beta;
}
