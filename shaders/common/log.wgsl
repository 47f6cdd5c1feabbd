// Natural logarithm to float32's precision for normal positive x; drivers' own may be off by 1e-4.
// x = m·2^e with m in [√½, √2); log m = 2·atanh(z), z = (m - 1)/(m + 1), |z| < 0.172.

fn accurate_log(x: f32) -> f32 {
    let bits = bitcast<i32>(x);
    let e = (bits - 0x3f3504f3) >> 23u;
    let m = bitcast<f32>(bits - (e << 23u));
    let z = (m - 1.0) / (m + 1.0);
    let s = z * z;
    let series = 1.0 + s * (1.0 / 3.0 + s * (0.2 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s / 11.0))));
    return f32(e) * 0.69314718 + 2.0 * z * series;
}
