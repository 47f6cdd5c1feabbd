// y[row, :] (+)= Σ_j weights[row, j] · x[places[row · top + j], :]  (+ residual, with RESIDUAL)
// over the row's choices, their weights (WEIGHTED) or ones.
//
// x (·, columns) operand or float32 (BF16), y and residual (rows, columns) float32; y is
// overwritten or (ACCUMULATE) added to. Launcher: ops/routing.py.
//#include common/flat.wgsl
//#include common/unit4.wgsl

struct Params {
    rows: u32,
    stride: u32,
    top: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Unit4>;
@group(0) @binding(2) var<storage, read> places: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;
//#if WEIGHTED
@group(0) @binding(4) var<storage, read> weights: array<f32>;
//#endif
//#if RESIDUAL
@group(0) @binding(5) var<storage, read> residual: array<vec4<f32>>;
//#endif

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    var sum = vec4<f32>(0.0);
    for (var j = 0u; j < params.top; j += 1u) {
        let v = unpack4(x[places[row * params.top + j] * params.stride + i % params.stride]);
//#if WEIGHTED
        sum += weights[row * params.weight_stride + j] * v;
//#else
        sum += v;
//#endif
    }
//#if RESIDUAL
    sum += residual[i];
//#endif
//#if ACCUMULATE
    y[i] += sum;
//#else
    y[i] = sum;
//#endif
}
