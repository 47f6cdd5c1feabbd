// g[c] += inverse[c] · Σ_m dy[m, c] · z[m, c]
//
// dy (rows, columns) float32 or (DY_BF16) bfloat16, z operand, inverse and g (columns) float32.
// An invocation per column. Launcher: ops/dora.py.
//#include common/flat.wgsl
//#include common/unit4.wgsl
//#include common/gradient_in.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> z: array<Unit4>;
@group(0) @binding(3) var<storage, read> inverse: array<f32>;
@group(0) @binding(4) var<storage, read_write> g: array<f32>;

fn each(i: u32) {
    if (i >= params.columns) {
        return;
    }
    var sum = 0.0;
    for (var m = 0u; m < params.rows; m += 1u) {
        let at = m * params.stride + i / 4u;
        sum += gradient(at)[i % 4u] * unpack4(z[at])[i % 4u];
    }
    g[i] += inverse[i] * sum;
}
