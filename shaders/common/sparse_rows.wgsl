// Mean and standard deviation of a row of `gate`, and what is left of its elements beyond
// mean + deviations · standard deviation, for kernels whose THREADS invocations share a row.
struct Spread {
    mean: f32,
    deviation: f32,
}

fn spread_of(base: u32, thread: u32) -> Spread {
    let count = f32(params.columns);
    var sum = 0.0;
    for (var u = thread; u < params.stride; u += THREADS) {
        let v = load_gate(base + u);
        sum += dot(v.even + v.odd, vec4<f32>(1.0));
    }
    let mean = reduce_sum(sum, thread) / count;
    var squares = 0.0;
    for (var u = thread; u < params.stride; u += THREADS) {
        let apart = live8(u, less(load_gate(base + u), mean));
        squares += dot8(apart, apart);
    }
    return Spread(mean, sqrt(reduce_sum(squares, thread) / count));
}

fn less(v: Eight, s: f32) -> Eight {
    return Eight(v.even - s, v.odd - s);
}

fn cut_off(v: Eight, spread: Spread) -> Eight {
    let beyond = less(v, spread.mean + params.deviations * spread.deviation);
    return Eight(max(beyond.even, vec4<f32>(0.0)), max(beyond.odd, vec4<f32>(0.0)));
}
