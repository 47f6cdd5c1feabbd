// dz[m, c] = magnitude[c] · inverse[c] · dy[m, c]
//
// dy (rows, columns) float32 or (DY_BF16) bfloat16, dz operand, an image (IMAGE) or a buffer,
// overwritten, padding with zeros. Launcher: ops/dora.py.
//#include common/flat.wgsl
//#include common/gradient_in.wgsl
//#include common/operand_out.wgsl OPERAND=dz OPERAND_BINDING=4

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> magnitude: array<f32>;
@group(0) @binding(3) var<storage, read> inverse: array<f32>;

fn factor(first: u32) -> vec4<f32> {
    var found = vec4<f32>(0.0);
    for (var t = 0u; t < 4u; t += 1u) {
        if (first + t < params.columns) {
            found[t] = magnitude[first + t] * inverse[first + t];
        }
    }
    return found;
}

fn each(i: u32) {
    if (i >= params.rows * params.stride) {
        return;
    }
    let first = 8u * (i % params.stride);
    store_dz(i, factor(first) * gradient(2u * i), factor(first + 4u) * gradient(2u * i + 1u));
}
