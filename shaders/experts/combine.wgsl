// y[row, :] (+)= Σ_j weights[row, j] · x[slots[row · top_k + j], :] + residual[row, :]
// over the row's assignments; their weights are ones where none are bound.
//
// x (·, columns), y and residual (rows, columns); y float32, overwritten or (ACCUMULATE) added to.
// Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= x.stride
    top_k: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 4
@group(0) @binding(2) var<storage, read> slots: array<u32>;
//#output 3 y: 4 sum
//#if weights
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//#endif
//#input 5 residual?: 4

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    var sum = vec4<f32>(0.0);
    for (var j = 0u; j < params.top_k; j += 1u) {
        let v = load_x(slots[row * params.top_k + j] * params.stride + i % params.stride);
//#if weights
        sum += weights[row * params.weight_stride + j] * v;
//#else
        sum += v;
//#endif
    }
    store_y(i, sum + load_residual(i));
}
