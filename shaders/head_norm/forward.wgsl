// y = x · rstd · weight,  rstd = 1 / √(mean(x²) + eps), over each head of each row.
//
// x, y (rows, heads · head_dim) operands, head_dim even; weight (head_dim) float32. y is
// overwritten, its padding with zeros. One invocation takes a head. Launcher: ops/head_norm.py.
//#include common/flat.wgsl
//#include common/element_io.wgsl X_BINDING=1 Y_BINDING=3

struct Params {
    rows: u32,
    heads: u32,
    head_dim: u32,
    stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> weight: array<f32>;

fn each(i: u32) {
    let row = i / params.heads;
    if (row >= params.rows) {
        return;
    }
    let head = i % params.heads;
    let base = row * params.stride + head * params.head_dim;
    var sum = 0.0;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let v = load_x(base + d);
        sum += v * v;
    }
    let r = inverseSqrt(sum / f32(params.head_dim) + params.eps);
    for (var d = 0u; d < params.head_dim; d += 2u) {
        store_y((base + d) / 2u, r * vec2<f32>(load_x(base + d) * weight[d], load_x(base + d + 1u) * weight[d + 1u]));
    }
    if (head == params.heads - 1u) {
        for (var at = base + params.head_dim; at < (row + 1u) * params.stride; at += 2u) {
            store_y(at / 2u, vec2<f32>(0.0));
        }
    }
}
