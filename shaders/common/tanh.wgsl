// tanh, more exact than drivers' own: by exp, and by its series where that would cancel.
fn tanh_of(x: f32) -> f32 {
    let square = x * x;
    if (square < 0.09) {
        return x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * 0.0218694885))));
    }
    let e = exp(-2.0 * abs(x));
    return sign(x) * (1.0 - e) / (1.0 + e);
}
