// Γ of four tokens from i on with four from j on: sums of ĝ one by one, since differences of running
// sums would lose what a strong decay before them took. Zero above the diagonal.
var<workgroup> logs: array<f32, CHUNK>;

fn decays(i: u32, j: u32) -> array<vec4<f32>, 4> {
    let columns = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u);
    var sums = vec4<f32>(0.0);
    for (var t = j + 1u; t < i; t += 1u) {
        sums += select(vec4<f32>(0.0), vec4<f32>(logs[t]), vec4<u32>(t) > columns);
    }
    var gamma: array<vec4<f32>, 4>;
    for (var r = 0u; r < 4u; r += 1u) {
        let t = i + r;
        sums += select(vec4<f32>(0.0), vec4<f32>(logs[t]), vec4<u32>(t) > columns);
        let ratio = exp(max(sums, vec4<f32>(-200.0)));
        gamma[r] = select(vec4<f32>(0.0), ratio, vec4<u32>(t) >= columns);
    }
    return gamma;
}

// Below the diagonal: the place of (i, j), j < i.
var<workgroup> lower: array<f32, CHUNK * (CHUNK - 1u) / 2u>;

fn place(i: u32, j: u32) -> u32 {
    return i * (i - 1u) / 2u + j;
}
