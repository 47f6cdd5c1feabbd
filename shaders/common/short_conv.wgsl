// What kernels of short convolutions share: a tap's weights, the bias, and what becomes of the sum.
//#include common/convolved.wgsl

//#if GATED
fn gate_out(row: u32, unit: u32) -> Eight {
    return load_x(row * params.stride + params.hidden + unit);
}

fn finished(row: u32, unit: u32, sum: Eight) -> Eight {
    return multiply8(gate_out(row, unit), sum);
}
//#else
//#include common/activation.wgsl
fn finished(row: u32, unit: u32, sum: Eight) -> Eight {
    return activate8(sum);
}
//#endif

// The weights of eight neighbouring channels for the token that lies so many before.
fn tap(unit: u32, before: u32) -> Eight {
    var low4 = vec4<f32>(0.0);
    var high4 = vec4<f32>(0.0);
    for (var c = 0u; c < 4u; c += 1u) {
        let at = (8u * unit + c) * params.weight_stride + params.taps - 1u - before;
        low4[c] = load_weight(at);
        high4[c] = load_weight(at + 4u * params.weight_stride);
    }
    return eight(low4, high4);
}

fn bias_of(unit: u32) -> Eight {
//#if bias
    return load_bias(unit);
//#else
    return zero8();
//#endif
}
