// What a mask of dropout leaves: 1 - mask.

fn rest8(mask: Eight) -> Eight {
    return add_scaled8(eight(vec4<f32>(1.0), vec4<f32>(1.0)), -1.0, mask);
}
