// magnitude[c] · inverse[c] of eight columns; zero past params.columns.
@group(0) @binding(2) var<storage, read> magnitude: array<f32>;
@group(0) @binding(3) var<storage, read> inverse: array<f32>;

fn factor(c: u32) -> f32 {
    if (c >= params.columns) {
        return 0.0;
    }
    return magnitude[c] * inverse[c];
}

fn factor8(unit: u32) -> Eight {
    let c = 8u * unit;
    return Eight(
        vec4<f32>(factor(c), factor(c + 2u), factor(c + 4u), factor(c + 6u)),
        vec4<f32>(factor(c + 1u), factor(c + 3u), factor(c + 5u), factor(c + 7u)),
    );
}
