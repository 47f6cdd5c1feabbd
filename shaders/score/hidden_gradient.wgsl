// dx[i, :] = Σ_c dscores[i · classes + c] · w[c, :].
//
// w (classes, columns) and dscores float32; dx (rows, columns) float32, overwritten.
// Launcher: ops/score.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= dx.rows
    classes: u32, //= w.rows
    stride: u32, //= dx.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 w: 4 float32
@group(0) @binding(2) var<storage, read> dscores: array<f32>;
//#output 3 dx: 4

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    var sum = vec4<f32>(0.0);
    for (var c = 0u; c < params.classes; c += 1u) {
        sum += dscores[row * params.classes + c] * load_w(c * params.stride + i % params.stride);
    }
    store_dx(i, sum);
}
