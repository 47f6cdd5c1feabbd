// y[m, c] = magnitude[c] · inverse[c] · z[m, c]  + bias[c] + residual[m, c]
//
// z (rows, columns) operand, y operand or float32 (OUT_BF16), overwritten, padding with zeros;
// magnitude, inverse, bias (columns), residual (rows, columns) float32. Launcher: ops/dora.py.
//#include common/flat.wgsl
//#include common/unit4.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> z: array<Unit4>;
@group(0) @binding(2) var<storage, read> magnitude: array<f32>;
@group(0) @binding(3) var<storage, read> inverse: array<f32>;
//#if BIAS
@group(0) @binding(4) var<storage, read> bias: array<f32>;
//#endif
//#if RESIDUAL
@group(0) @binding(5) var<storage, read> residual: array<vec4<f32>>;
//#endif
//#if OUT_BF16
@group(0) @binding(6) var<storage, read_write> y: array<vec2<u32>>;
//#else
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>;
//#endif

fn each(i: u32) {
    if (i >= params.rows * params.stride) {
        return;
    }
    let first = 4u * (i % params.stride);
    var factor = vec4<f32>(0.0);
    var added = vec4<f32>(0.0);
    for (var t = 0u; t < 4u; t += 1u) {
        let c = first + t;
        if (c < params.columns) {
            factor[t] = magnitude[c] * inverse[c];
//#if BIAS
            added[t] = bias[c];
//#endif
        }
    }
    var v = factor * unpack4(z[i]) + added;
//#if RESIDUAL
    v += residual[i];
//#endif
//#if OUT_BF16
    y[i] = pack_bf16(v);
//#else
    y[i] = v;
//#endif
}
