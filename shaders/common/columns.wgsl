// Values of a row's columns; zero past params.columns.
fn live4(unit: u32, v: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(0.0), v, vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.columns));
}

fn live8(unit: u32, v: Eight) -> Eight {
    let even = vec4<u32>(8u * unit) + vec4<u32>(0u, 2u, 4u, 6u);
    return Eight(
        select(vec4<f32>(0.0), v.even, even < vec4<u32>(params.columns)),
        select(vec4<f32>(0.0), v.odd, even + vec4<u32>(1u) < vec4<u32>(params.columns)),
    );
}
