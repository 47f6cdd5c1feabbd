fn eight_of(v: array<f32, 8>) -> Eight {
    return Eight(vec4<f32>(v[0], v[2], v[4], v[6]), vec4<f32>(v[1], v[3], v[5], v[7]));
}
