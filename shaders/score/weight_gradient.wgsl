// gradient[c, :] += Σ_i dscores[i · classes + c] · x[i, :].
//
// x (rows, columns) of any type, dscores float32, gradient (classes, columns) float32.
// Launcher: ops/score.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    classes: u32, //= gradient.rows
    stride: u32, //= x.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 4
@group(0) @binding(2) var<storage, read> dscores: array<f32>;
//#output 3 gradient: 4 sum

fn each(i: u32) {
    let c = i / params.stride;
    if (c >= params.classes) {
        return;
    }
    var sum = vec4<f32>(0.0);
    for (var row = 0u; row < params.rows; row += 1u) {
        sum += dscores[row * params.classes + c] * load_x(row * params.stride + i % params.stride);
    }
    store_gradient(i, sum);
}
