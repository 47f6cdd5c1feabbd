// Mean and rstd = 1 / √(mean((x - mean)²) + eps) of the head of x whose pairs begin at base.
fn head_statistics(base: u32) -> vec2<f32> {
    let count = f32(2u * params.head_dim);
    var sum = 0.0;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let v = load_x(base + d);
        sum += v.x;
        sum += v.y;
    }
    let mean = sum / count;
    var squares = 0.0;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let v = load_x(base + d) - mean;
        squares += v.x * v.x;
        squares += v.y * v.y;
    }
    return vec2<f32>(mean, inverseSqrt(squares / count + params.eps));
}
