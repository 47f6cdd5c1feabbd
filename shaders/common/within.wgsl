// The elements of a row's unit that lie before its padding.
fn within(v: Eight, unit: u32, columns: u32) -> Eight {
    let first = vec4<u32>(8u * unit) + vec4<u32>(0u, 2u, 4u, 6u);
    let none = vec4<f32>(0.0);
    let end = vec4<u32>(columns);
    return Eight(select(none, v.even, first < end), select(none, v.odd, first + 1u < end));
}
