// What preferences' kernels share. A micro-batch's samples are (first label row, one past the last,
// the reference's summed log probability, a number of the objective's), the last two as bits of
// float32; batch_info[3] of them.
//#include common/log.wgsl
//#include common/logistic.wgsl
//#include common/softplus.wgsl

fn reference_of(sample: vec4<u32>) -> f32 {
    return bitcast<f32>(sample.z);
}

fn number_of(sample: vec4<u32>) -> f32 {
    return bitcast<f32>(sample.w);
}

fn logistic(x: f32) -> f32 {
    return sigmoid(vec4<f32>(x)).x;
}

fn logistic_slope(x: f32) -> f32 {
    return sigmoid_gradient(vec4<f32>(x)).x;
}

fn log_logistic(x: f32) -> f32 {
    return -softplus(vec4<f32>(-x)).x;
}

// 1 - eˣ of a number below zero, of which a small one would be rounded away.
fn one_minus_exp(x: f32) -> f32 {
    let series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))));
    return select(1.0 - exp(x), series, x > -0.1);
}
